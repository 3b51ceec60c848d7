-- Two steps train the same global batch when they hold the same samples in the same arrival order.
-- Warm-up steps have a policy of their own and do not count.
with wanted as (
    -- When all roll-ups are computed again, a run without training steps is named by its comparison alone.
    select distinct split_part(id, '/', 1) || '/compare' as compare_id
    from (select unnest($run_ids) as id) as ids
),

compared as (
    select
        run_id,
        attempt,
        step,
        policy,
        step_s,
        predicted_step_s,
        1 - busy_s / nullif(num_ranks * step_s, 0) as idle_frac
    from step_rollup
    where run_id in (select wanted.compare_id from wanted) and policy in ('arrival', 'balanced')
),

step as (
    select
        compared.run_id,
        step_plan.sample_index,
        compared.policy,
        compared.step,
        compared.step_s,
        compared.predicted_step_s,
        compared.idle_frac
    from compared
    inner join step_plan using (run_id, step)
    where step_plan.run_id in (select wanted.compare_id from wanted)
    -- A comparison that was started again counts with its last attempt.
    qualify
        compared.attempt = max(compared.attempt) over (partition by compared.run_id)
        and row_number() over (
            partition by compared.run_id, compared.attempt, compared.step, compared.policy
            order by step_plan._producer desc, step_plan._seq desc, step_plan.rowid desc
        ) = 1
)

select
    split_part(run_id, '/', 1) as run_id,
    min(step) as first_step,
    len(sample_index) as num_samples,
    count(*) filter (where policy = 'arrival') as num_arrival_steps,
    count(*) filter (where policy = 'balanced') as num_balanced_steps,
    median(step_s) filter (where policy = 'arrival') as arrival_step_s,
    median(step_s) filter (where policy = 'balanced') as balanced_step_s,
    median(predicted_step_s) filter (where policy = 'arrival') as arrival_predicted_s,
    median(predicted_step_s) filter (where policy = 'balanced') as balanced_predicted_s,
    avg(idle_frac) filter (where policy = 'arrival') as arrival_idle_frac,
    avg(idle_frac) filter (where policy = 'balanced') as balanced_idle_frac
from step
group by run_id, sample_index
having num_arrival_steps > 0 and num_balanced_steps > 0

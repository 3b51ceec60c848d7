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
    where
        run_id in (select wanted.compare_id from wanted)
        and policy in ('arrival', 'length_grouped', 'token_lpt', 'token_kk', 'balanced')
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
),

side as (
    select
        run_id,
        sample_index,
        policy,
        min(min(step)) over (partition by run_id, sample_index) as first_step,
        count(*) as num_steps,
        median(step_s) as step_s,
        median(predicted_step_s) as predicted_s,
        avg(idle_frac) as idle_frac
    from step
    group by run_id, sample_index, policy
)

select
    split_part(run_id, '/', 1) as run_id,
    baseline.policy as baseline,
    baseline.first_step,
    len(sample_index) as num_samples,
    baseline.num_steps as num_baseline_steps,
    ours.num_steps as num_balanced_steps,
    baseline.step_s as baseline_step_s,
    ours.step_s as balanced_step_s,
    baseline.predicted_s as baseline_predicted_s,
    ours.predicted_s as balanced_predicted_s,
    baseline.idle_frac as baseline_idle_frac,
    ours.idle_frac as balanced_idle_frac
from side as baseline
inner join side as ours using (run_id, sample_index)
where baseline.policy <> 'balanced' and ours.policy = 'balanced'

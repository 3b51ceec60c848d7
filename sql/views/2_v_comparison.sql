-- Two steps train the same global batch when they hold the same samples in the same arrival order.
-- Warm-up steps have a policy of their own and do not count.
create or replace view v_comparison as
with step as (
    select
        v_step.run_id,
        step_plan.sample_index,
        v_step.policy,
        v_step.step,
        v_step.step_s,
        v_step.predicted_step_s,
        v_step.idle_frac
    from v_step
    inner join step_plan using (run_id, step)
    where suffix(v_step.run_id, '/compare') and v_step.policy in ('arrival', 'balanced')
    -- A comparison that was started again counts with its last attempt.
    qualify
        v_step.attempt = max(v_step.attempt) over (partition by v_step.run_id)
        and row_number() over (partition by v_step.run_id, v_step.step order by step_plan._producer desc) = 1
)

select
    split_part(run_id, '/', 1) as run_id,
    min(step) as first_step,
    len(sample_index) as num_samples,
    count(*) filter (where policy = 'arrival') as num_arrival_steps,
    count(*) filter (where policy = 'balanced') as num_balanced_steps,
    median(step_s) filter (where policy = 'arrival') as arrival_step_s,
    median(step_s) filter (where policy = 'balanced') as balanced_step_s,
    median(step_s) filter (where policy = 'arrival')
    / median(step_s) filter (where policy = 'balanced') as measured_speedup,
    median(predicted_step_s) filter (where policy = 'arrival')
    / median(predicted_step_s) filter (where policy = 'balanced') as predicted_speedup,
    avg(idle_frac) filter (where policy = 'arrival') as arrival_idle_frac,
    avg(idle_frac) filter (where policy = 'balanced') as balanced_idle_frac
from step
group by run_id, sample_index
having num_arrival_steps > 0 and num_balanced_steps > 0;

comment on view v_comparison is
'The same global batch under both policies, medians over repeats. Grain: one row per run and global batch. Seconds.';

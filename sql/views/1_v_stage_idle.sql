-- idle = gradient reduction + optimizer + bubble (waiting for neighbour stages, or for a shared core).
-- The wait for input comes before a step begins and is no part of step_s.
create or replace view v_stage_idle as
select
    run_id,
    policy,
    module,
    stage,
    dp_rank,
    num_steps,
    busy_s / nullif(step_s, 0) as busy_frac,
    1 - busy_s / nullif(step_s, 0) as idle_frac,
    data_wait_s / nullif(data_wait_s + step_s, 0) as input_wait_frac,
    reduce_s / nullif(step_s, 0) as reduce_frac,
    optimizer_s / nullif(step_s, 0) as optimizer_frac,
    1 - (busy_s + reduce_s + optimizer_s) / nullif(step_s, 0) as bubble_frac
from stage_rollup;

comment on view v_stage_idle is
'Time of each stage by kind, as shares of step_s. Grain: run_id, policy, module, stage, dp_rank.';
comment on column v_stage_idle.busy_frac is 'share of the steps in forward and backward, ratio';
comment on column v_stage_idle.idle_frac is 'share of the steps in everything else, ratio';
comment on column v_stage_idle.input_wait_frac is
'wait for input before the steps over the steps, ratio; not part of them';
comment on column v_stage_idle.reduce_frac is 'share of the steps in gradient reduction, ratio';
comment on column v_stage_idle.optimizer_frac is 'share of the steps in the optimizer, ratio';
comment on column v_stage_idle.bubble_frac is 'remaining share of the steps: waits for other stages, ratio';

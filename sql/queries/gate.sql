-- purpose: when correcting by size was worth its time in a run, and what that was judged by
-- parameters: $run_id varchar, the run
-- grain: one row per reading, oldest first; is_switch marks those that turned it on or off
-- units: gains, their standard error and the cost are shares of a step; steps count from 0
select
    step,
    attempt,
    is_on,
    is_switch,
    gain_frac,
    mean_gain_frac,
    stderr_frac,
    cost_frac,
    num_stderrs,
    num_readings,
    observed_at
from v_gate
where run_id = $run_id
order by observed_at, attempt, step;

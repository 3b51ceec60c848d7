-- purpose: faults that a run recovered from: failed or late schedulers, fallback schedules, steps that are not finite
-- parameters: $run_id varchar, the run (its comparison comes with it)
-- grain: one row per event, oldest first
-- units: steps count from 0
select
    utc(observed_at_s) as observed_at,
    job,
    attempt,
    step,
    kind,
    detail
from run_event
where run_id = $run_id or run_id = $run_id || '/compare'
order by observed_at_s, attempt, step, kind;

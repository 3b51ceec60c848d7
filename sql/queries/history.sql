-- purpose: the event log of a run, in order, as in `dflop history`
-- parameters: $run_id varchar, the run
-- grain: one row per event, oldest first
-- units: seconds; elapsed_s since the run began, gain_s over the remaining steps; steps count from 0
select
    elapsed_s,
    step,
    attempt,
    kind,
    subject,
    verdict,
    gain_s,
    cost_s,
    detail,
    observed_at
from v_history
where run_id = $run_id
order by number;

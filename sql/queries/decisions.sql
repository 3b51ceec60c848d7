-- purpose: drifts, slow ranks and re-planning decisions of a run, with their figures
-- parameters: $run_id varchar, the run
-- grain: one row per decision, oldest first
-- units: gain_s (over the remaining steps) and cost_s in seconds; measured and expected as in detail
select
    observed_at,
    attempt,
    step,
    kind,
    subject,
    verdict,
    measured,
    expected,
    gain_s,
    cost_s,
    num_steps_left,
    layout_text,
    new_layout_text,
    detail
from v_decision
where run_id = $run_id
order by observed_at, step, kind, subject;

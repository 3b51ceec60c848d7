-- purpose: what a run noticed about its own speed, what it did about it, and on which figures
-- parameters: $run_id varchar, the run
-- grain: one row per decision, oldest first
-- units: gain_s (over the steps that are left) and cost_s in seconds; measured and expected as detail says
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

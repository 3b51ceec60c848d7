-- purpose: how the plan of a configuration changed from run to run, and why
-- parameters: $name varchar, name of the configuration
-- grain: one row per run, oldest first
-- units: seconds; corrections are ratios that multiply predicted seconds
select
    started_at,
    run_id,
    layout_text,
    num_microbatches,
    predicted_step_s,
    previous_predicted_step_s,
    changed,
    previous_corrections_text,
    corrections_text,
    previous_snapshot_seq,
    snapshot_seq,
    reason
from v_plan_history
where name = $name
order by started_at, run_id;

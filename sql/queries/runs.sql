-- purpose: all runs, newest first, with what data-aware scheduling gained
-- parameters: none
-- grain: one row per run
-- units: seconds; speedups and idle fractions are ratios
select
    run_id,
    state,
    plan_layout,
    num_steps,
    first_loss,
    last_loss,
    arrival_step_s,
    balanced_step_s,
    measured_speedup,
    predicted_speedup,
    arrival_idle_frac,
    balanced_idle_frac
from v_run_summary
order by started_at_s desc;

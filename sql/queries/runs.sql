-- purpose: all runs, newest first, with what data-aware scheduling gained
-- parameters: none
-- grain: one row per run
-- units: seconds; hours; speedups (of v_speedup, 95 % intervals; planned: simulated when planning) and idle are ratios
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
    measured_speedup_low,
    measured_speedup_high,
    predicted_speedup,
    predicted_speedup_low,
    predicted_speedup_high,
    planned_speedup,
    planned_speedup_over_uniform,
    arrival_idle_frac,
    balanced_idle_frac,
    process_hours
from v_run_summary
order by started_at desc;

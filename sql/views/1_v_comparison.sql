create or replace view v_comparison as
select
    run_id,
    first_step,
    num_samples,
    num_arrival_steps,
    num_balanced_steps,
    arrival_step_s,
    balanced_step_s,
    arrival_step_s / balanced_step_s as measured_speedup,
    arrival_predicted_s / balanced_predicted_s as predicted_speedup,
    arrival_idle_frac,
    balanced_idle_frac
from comparison_rollup;

comment on view v_comparison is
'The same global batch under both policies, medians over repeats. Grain: one row per run and global batch. Seconds.';

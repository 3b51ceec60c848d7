-- purpose: batch by batch, the same global batch under each baseline and balanced, measured and predicted
-- parameters: $run_id varchar, the run (without /compare)
-- grain: one row per baseline and global batch
-- units: seconds; measured_speedup and predicted_speedup are ratios
select
    baseline,
    first_step,
    num_samples,
    baseline_step_s,
    balanced_step_s,
    measured_speedup,
    predicted_speedup,
    baseline_idle_frac,
    balanced_idle_frac
from v_comparison
where run_id = $run_id
order by baseline, first_step;

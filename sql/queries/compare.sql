-- purpose: batch by batch, the same global batch in arrival order and balanced, measured and predicted
-- parameters: $run_id varchar, the run (without /compare)
-- grain: one row per global batch that ran under both policies
-- units: seconds; measured_speedup and predicted_speedup are ratios
select
    first_step,
    num_samples,
    arrival_step_s,
    balanced_step_s,
    measured_speedup,
    predicted_speedup,
    arrival_idle_frac,
    balanced_idle_frac
from v_comparison
where run_id = $run_id
order by first_step;

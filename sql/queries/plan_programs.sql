-- purpose: proven bounds on a run's plans: for the planning formula, not for simulated steps
-- parameters: $run_id varchar, the run
-- grain: one row per plan that was chosen and number of microbatches
-- units: seconds of the formula; gap_frac is how much of objective_s a better plan could save
select
    plan_id,
    num_microbatches,
    status,
    objective_s,
    bound_s,
    gap_frac,
    incumbent_s,
    num_columns,
    num_columns_left,
    process_price_s
from plan_program
where run_id = $run_id
order by _producer asc, _seq asc, num_microbatches asc;

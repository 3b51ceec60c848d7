-- purpose: whether ranks had their cores: wall and compute time of forward and backward, next to what was predicted
-- parameters: $run_id varchar, the run (or <run_id>/compare)
-- grain: one row per step and attempt, in order
-- units: seconds; compute: processor time on CPUs; wall_to_compute 1.3: the cores were taken for 23 % of the wall time
select
    step,
    attempt,
    step_s,
    predicted_step_s,
    predicted_step_s / nullif(step_s, 0) as predicted_to_measured,
    wall_s,
    compute_s,
    wall_to_compute
from v_step
where run_id = $run_id
order by step, attempt;

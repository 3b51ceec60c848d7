-- purpose: the slowest steps, with the error of their prediction
-- parameters: $run_id varchar, the run (or <run_id>/compare)
-- grain: one row per step, the 20 slowest
-- units: seconds, tokens; idle_frac and predicted_to_measured are ratios
select
    step,
    attempt,
    policy,
    step_s,
    predicted_step_s,
    predicted_step_s / nullif(step_s, 0) as predicted_to_measured,
    idle_frac,
    num_llm_tokens
from v_step
where run_id = $run_id
order by step_s desc, step asc, attempt asc
limit 20;

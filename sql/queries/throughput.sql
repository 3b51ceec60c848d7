-- purpose: speed of a run over time, smoothed over ten steps
-- parameters: $run_id varchar, the run
-- grain: one row per step and attempt
-- units: samples per second, tokens per second; idle_frac and mfu_frac (model FLOPs utilisation) are ratios
select
    step,
    attempt,
    observed_at,
    step_s,
    samples_per_s,
    llm_tokens_per_s,
    recent_llm_tokens_per_s,
    idle_frac,
    mfu_frac
from v_throughput
where run_id = $run_id
order by step, attempt;

-- purpose: error of predicted seconds, by module and size of the microbatch
-- parameters: $run_id varchar, the run (its comparison steps are included)
-- grain: one row per run_id, policy, module and power of two of tokens
-- units: tokens; errors and predicted_to_measured are ratios
select
    module,
    min_tokens,
    below_tokens,
    run_id,
    policy,
    num_spans,
    median_error_frac,
    p95_error_frac,
    predicted_to_measured
from v_prediction_error_by_size
where run_id in ($run_id, $run_id || '/compare')
order by module, min_tokens, run_id, policy;

-- purpose: the current cost tables: errors, probed range, and corrections
-- parameters: none
-- grain: one row per model profile, module, tp, hardware, software, dtype, trains, recompute
-- units: seconds per layer and million tokens beyond the last knot; errors, noise and factor are ratios
select
    module,
    tp,
    trains,
    recompute,
    hardware,
    software,
    dtype,
    source,
    num_layers,
    1e6 * forward_s.layer_per_token as forward_s_per_layer_mtoken,
    1e6 * backward_s.layer_per_token as backward_s_per_layer_mtoken,
    len(forward_s.layer_knots) as num_knots,
    num_measurements,
    median_error_frac,
    p95_error_frac,
    noise_frac,
    min_tokens,
    max_tokens,
    max_mean_length,
    factor,
    corrected_by_run_id,
    table_id,
    profile_key
from v_cost_effective
order by hardware, profile_key, module, tp, trains, recompute;

-- purpose: the cost tables in force, how good they are, and what corrects them
-- parameters: none
-- grain: one row per model profile, module, tp, hardware, software, dtype
-- units: seconds per layer and million tokens; errors and factor are ratios
select
    module,
    tp,
    hardware,
    software,
    dtype,
    source,
    num_layers,
    1e6 * forward_s.layer_per_token as forward_s_per_layer_mtoken,
    1e6 * backward_s.layer_per_token as backward_s_per_layer_mtoken,
    median_error_frac,
    factor,
    corrected_by_run_id,
    table_id,
    profile_key
from v_cost_effective
order by hardware, profile_key, module, tp;

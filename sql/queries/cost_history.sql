-- purpose: how the cost of a module changed over time and machines, with corrections
-- parameters: $module varchar, llm or the name of an encoder
-- grain: one row per cost table, in the order of its fit
-- units: seconds per layer and million tokens at 8 sequences of 1024 tokens; factor and change_ratio are ratios; UTC
select
    tp,
    hardware,
    fitted_at,
    forward_s_per_layer_mtoken,
    backward_s_per_layer_mtoken,
    factor,
    corrected_s_per_layer_mtoken,
    change_ratio,
    source,
    trains,
    recompute,
    software,
    dtype,
    profile_key,
    table_id
from v_cost_history
where module = $module
order by tp asc, trains asc, recompute asc, fitted_at asc nulls first, table_id asc;

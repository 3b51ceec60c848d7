-- purpose: what runs on this kind of hardware learnt about a module's cost, one correction after the other
-- parameters: $module varchar, llm or the name of an encoder
-- grain: one row per correction, the 200 newest first
-- units: ratios; factor multiplies predicted seconds
select
    to_timestamp(observed_at_s) as observed_at,
    table_id,
    run_id,
    effective_step,
    previous_factor,
    factor,
    change_frac,
    residual_frac,
    num_observations
from v_correction_history
where module = $module
order by observed_at_s desc, table_id asc, effective_step desc, run_id asc
limit 200;

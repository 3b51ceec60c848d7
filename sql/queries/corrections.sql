-- purpose: cost corrections of a module by length bucket, learned by runs on this hardware
-- parameters: $module varchar, llm or the name of an encoder
-- grain: one row per correction and bucket of sizes, the 200 newest first; max_tokens is null where one has no end
-- units: tokens; ratios: factor multiplies predicted seconds of items in the bucket, level is the overall factor
select
    observed_at,
    table_id,
    run_id,
    effective_step,
    min_tokens,
    nullif(max_tokens, 9007199254740992) as max_tokens,
    previous_factor,
    factor,
    change_frac,
    sd_frac,
    is_in_force,
    level,
    residual_frac,
    num_observations
from v_correction_history
where module = $module
order by observed_at desc, table_id asc, effective_step desc, run_id asc, min_tokens asc
limit 200;

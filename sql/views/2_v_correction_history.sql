create or replace view v_correction_history as
select
    table_id,
    module,
    min_tokens,
    max_tokens,
    utc(observed_at_s) as observed_at,
    run_id,
    effective_step,
    factor,
    lag(factor) over earlier as previous_factor,
    factor / lag(factor) over earlier - 1 as change_frac,
    sd_frac,
    is_in_force,
    level,
    residual_frac,
    num_observations
from correction
window earlier as (
    partition by table_id, module, min_tokens, max_tokens
    order by observed_at_s, effective_step, run_id, _producer, _seq, rowid
);

comment on view v_correction_history is
'Every factor of a bucket of sizes with the one before it, over all runs; buckets with other bounds are others. '
'Grain: one row per correction. Ratios; sizes in tokens.';
comment on column v_correction_history.previous_factor is
'factor of the same bucket before this one, ratio; null for the first';
comment on column v_correction_history.change_frac is 'factor over the one before, less 1, ratio';

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
'Every factor of a length bucket with the previous one, over all runs; buckets differ if their bounds do. '
'Grain: one row per correction. Ratios; sizes in tokens.';
comment on column v_correction_history.previous_factor is
'previous factor of the same bucket, ratio; null for the first';
comment on column v_correction_history.change_frac is 'relative change of the factor, ratio';

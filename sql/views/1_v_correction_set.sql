-- A running job writes its factors again and again: is_change tells which sets change what plans are made with.
create or replace view v_correction_set as
with bucket as (
    select
        *,
        greatest(factor / nullif(level, 0), level / nullif(factor, 0)) as deviation,
        lag(level) over earlier as previous_level,
        lag(is_in_force) over earlier as was_in_force,
        lag(factor) over earlier as previous_factor
    from correction
    window earlier as (
        partition by run_id, table_id, module, min_tokens, max_tokens
        order by observed_at_s, effective_step, _producer, _seq, rowid
    )
)

select
    run_id,
    table_id,
    module,
    effective_step,
    utc(observed_at_s) as observed_at,
    max(level) as level, -- noqa: RF04
    count(*) as num_buckets,
    count(*) filter (where is_in_force) as num_in_force,
    -- The first field decides.
    max({
        deviation: deviation,
        min_tokens: min_tokens,
        max_tokens: max_tokens,
        factor: factor,
        sd_frac: sd_frac,
        is_in_force: is_in_force
    }) as worst,
    max(residual_frac) as residual_frac,
    max(num_observations) as num_observations,
    bool_or(
        was_in_force is null
        or was_in_force != is_in_force
        or level not between previous_level / 1.01 and previous_level * 1.01
        or (is_in_force and factor not between previous_factor / 1.01 and previous_factor * 1.01)
    ) as is_change
from bucket
group by run_id, table_id, module, effective_step, observed_at_s;

comment on view v_correction_set is
'Corrections of a module that were written together; worst: the bucket with the largest deviation from the level; '
'is_change: factors changed by more than 1 %. Grain: run_id, table_id, module, observed_at. Ratios.';
comment on column v_correction_set.level is 'factor of the module over all its items, ratio';
comment on column v_correction_set.num_buckets is 'length buckets in the set';
comment on column v_correction_set.num_in_force is 'active buckets';
comment on column v_correction_set.worst is
'the bucket with the largest deviation from the overall factor, with its sizes (tokens) and factors (ratios)';
comment on column v_correction_set.residual_frac is
'largest of the buckets'' median absolute relative errors of the uncorrected prediction, ratio';
comment on column v_correction_set.num_observations is 'most microbatches that any bucket was learned from';
comment on column v_correction_set.is_change is 'whether factors changed by more than 1 %';

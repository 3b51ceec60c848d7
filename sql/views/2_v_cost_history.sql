-- The reference load is a microbatch of 8 sequences of 1024 tokens: 8192 tokens, 8388608 squared. A refit that gave the
-- same table is the same table. Corrections are those learned last, however long after the fit.
create or replace view v_cost_history as
with dated as (
    select
        profile_key,
        run_id as _run_id,
        max(created_at_s) as created_at_s
    from profile_record
    group by all
),

corrected as (
    select
        table_id,
        module,
        max(level) as factor
    from v_correction_latest
    group by all
),

timed as (
    select
        cost_table.*,
        coalesce(nullif(cost_table.fitted_at_s, 0), dated.created_at_s) as at_s
    from cost_table
    left join dated on cost_table.profile_key = dated.profile_key and cost_table._run_id = dated._run_id
    qualify
        row_number() over (
            partition by cost_table.profile_key, cost_table.table_id
            order by
                at_s asc nulls last, cost_table._run_id asc, cost_table._producer asc, cost_table._seq asc,
                cost_table.rowid asc
        ) = 1
),

priced as (
    select
        *,
        1e6 / 8192 * (
            forward_s.layer_fixed + 8192 * forward_s.layer_per_token + 8388608 * forward_s.layer_per_sq_token
            + coalesce(list_sum([
                part[1] * least(part[2], 8192) for part in list_zip(forward_s.layer_bends, forward_s.layer_knots)
            ]), 0)
        ) as forward_s_per_layer_mtoken,
        1e6 / 8192 * (
            backward_s.layer_fixed + 8192 * backward_s.layer_per_token + 8388608 * backward_s.layer_per_sq_token
            + coalesce(list_sum([
                part[1] * least(part[2], 8192) for part in list_zip(backward_s.layer_bends, backward_s.layer_knots)
            ]), 0)
        ) as backward_s_per_layer_mtoken
    from timed
)

select
    priced.module,
    priced.tp,
    priced.trains,
    priced.recompute,
    utc(priced.at_s) as fitted_at,
    priced.hardware,
    priced.software,
    priced.dtype,
    priced.source,
    priced.num_layers,
    priced.forward_s_per_layer_mtoken,
    priced.backward_s_per_layer_mtoken,
    coalesce(corrected.factor, 1.0) as factor,
    (priced.forward_s_per_layer_mtoken + priced.backward_s_per_layer_mtoken) * coalesce(corrected.factor, 1.0)
        as corrected_s_per_layer_mtoken,
    corrected_s_per_layer_mtoken / nullif(lag(corrected_s_per_layer_mtoken) over earlier, 0) as change_ratio,
    priced.median_error_frac,
    priced.num_measurements,
    priced.table_id,
    priced.profile_key,
    latest.table_id is not null as is_latest,
    priced._run_id as run_id
from priced
left join corrected on priced.table_id = corrected.table_id and priced.module = corrected.module
left join v_cost_table_latest as latest
    on priced.profile_key = latest.profile_key and priced.table_id = latest.table_id
window earlier as (
    partition by
        priced.module, priced.tp, priced.hardware, priced.dtype, priced.trains, priced.recompute, priced.source,
        priced.num_layers
    order by priced.at_s asc nulls first, priced.table_id asc
);

comment on view v_cost_history is
'Every cost table in the order of its fit, in seconds of one layer per million tokens at 8 sequences of 1024 tokens. '
'Grain: one row per profile_key, table_id.';
comment on column v_cost_history.fitted_at is
'when it was fitted; of fits that did not record it, when the profile was complete; null: unknown; UTC';
comment on column v_cost_history.forward_s_per_layer_mtoken is
'forward seconds of a layer per million tokens at the reference load, uncorrected';
comment on column v_cost_history.backward_s_per_layer_mtoken is
'backward seconds of a layer per million tokens at the reference load, uncorrected';
comment on column v_cost_history.factor is 'overall factor of its newest corrections, ratio; 1: none';
comment on column v_cost_history.corrected_s_per_layer_mtoken is 'forward and backward seconds times factor';
comment on column v_cost_history.change_ratio is
'corrected_s_per_layer_mtoken over that of the table before on the same hardware for the same module, tp, dtype and '
'way of running, ratio; null: the first';
comment on column v_cost_history.is_latest is 'whether it is the current table of its profile (v_cost_table_latest)';
comment on column v_cost_history.run_id is 'run that fitted it';

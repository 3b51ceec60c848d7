create or replace view v_cost_effective as
with correction_set as (
    select
        table_id,
        module,
        run_id,
        max(level) as factor
    from v_correction_latest
    group by all
),

corrected as (
    select
        cost_table.*,
        coalesce(correction_set.factor, 1.0) as factor,
        correction_set.run_id as corrected_by_run_id
    from v_cost_table_latest as cost_table
    left join correction_set using (table_id, module)
)

select
    table_id,
    profile_key,
    module,
    tp,
    hardware,
    software,
    dtype,
    trains,
    recompute,
    source,
    num_layers,
    factor,
    corrected_by_run_id,
    {
        layer_fixed: factor * forward_s.layer_fixed,
        layer_per_token: factor * forward_s.layer_per_token,
        layer_per_sq_token: factor * forward_s.layer_per_sq_token,
        edge_fixed: factor * forward_s.edge_fixed,
        edge_per_token: factor * forward_s.edge_per_token,
        edge_per_item: factor * forward_s.edge_per_item,
        layer_knots: forward_s.layer_knots,
        layer_bends: [factor * bend for bend in forward_s.layer_bends]
    } as forward_s,
    {
        layer_fixed: factor * backward_s.layer_fixed,
        layer_per_token: factor * backward_s.layer_per_token,
        layer_per_sq_token: factor * backward_s.layer_per_sq_token,
        edge_fixed: factor * backward_s.edge_fixed,
        edge_per_token: factor * backward_s.edge_per_token,
        edge_per_item: factor * backward_s.edge_per_item,
        layer_knots: backward_s.layer_knots,
        layer_bends: [factor * bend for bend in backward_s.layer_bends]
    } as backward_s,
    activation_bytes,
    num_measurements,
    median_error_frac,
    p95_error_frac,
    noise_frac,
    min_tokens,
    max_tokens,
    max_mean_length,
    optimizer_s_per_param
from corrected;

comment on view v_cost_effective is
'Current cost tables times the overall factor of their newest corrections (seconds only: not bytes or knots).';
comment on column v_cost_effective.table_id is 'identity of the cost table';
comment on column v_cost_effective.profile_key is 'model profile it was fitted to';
comment on column v_cost_effective.source is 'measured, derived (of a table of another tp) or analytic';
comment on column v_cost_effective.factor is
'overall factor of the newest corrections, which multiplies seconds, ratio; 1: none';
comment on column v_cost_effective.corrected_by_run_id is
'run that learned the corrections; null: none';
comment on column v_cost_effective.forward_s is
'terms of the forward time, corrected: seconds, per token, per squared token, per item; slope falls by a bend at '
'each knot';
comment on column v_cost_effective.backward_s is
'terms of the backward time, corrected: seconds, per token, per squared token, per item; slope falls by a bend at '
'each knot';
comment on column v_cost_effective.min_tokens is 'tokens of the smallest probe; 0: unknown';
comment on column v_cost_effective.max_tokens is 'tokens of the largest probe; 0: unknown';

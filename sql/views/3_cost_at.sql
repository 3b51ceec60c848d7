-- noqa: disable=LT02,RF02,RF04
-- Seconds and bytes of a whole module (all its layers and its edge) on one microbatch, correction included: the formula
-- of dflop/cost/model.py. cost_estimate answers anything and says whether it had to extrapolate beyond the probes;
-- cost_at answers only inside the probed range of tokens and raises an error outside, for a table it does not know and
-- for a null. An error's text is concatenated with concat(), for which null is empty: error(null) raises nothing.
create or replace macro cost_estimate(wanted_table_id, num_items, num_tokens, sum_sq_tokens) as table
with probed as (
    select
        cost.table_id,
        min(probe.num_tokens) as min_tokens,
        max(probe.num_tokens) as max_tokens,
        min(probe.sum_sq_tokens) as min_sum_sq_tokens,
        max(probe.sum_sq_tokens) as max_sum_sq_tokens
    from v_cost_effective as cost
    left join measurement as probe using (profile_key, module, tp, hardware, software, dtype)
    where cost.table_id = wanted_table_id
    group by all
)

select
    cost.table_id,
    cost.module,
    cost.tp,
    cost.source,
    cost.factor,
    case when num_tokens > 0 then
        cost.num_layers * (
            cost.forward_s.layer_fixed
            + cost.forward_s.layer_per_token * num_tokens
            + cost.forward_s.layer_per_sq_token * sum_sq_tokens
        )
        + cost.forward_s.edge_fixed
        + cost.forward_s.edge_per_token * num_tokens
        + cost.forward_s.edge_per_item * num_items
    else 0 end as forward_s,
    case when num_tokens > 0 then
        cost.num_layers * (
            cost.backward_s.layer_fixed
            + cost.backward_s.layer_per_token * num_tokens
            + cost.backward_s.layer_per_sq_token * sum_sq_tokens
        )
        + cost.backward_s.edge_fixed
        + cost.backward_s.edge_per_token * num_tokens
        + cost.backward_s.edge_per_item * num_items
    else 0 end as backward_s,
    case when num_tokens > 0 then
        cost.num_layers * (
            cost.activation_bytes.layer_fixed
            + cost.activation_bytes.layer_per_token * num_tokens
            + cost.activation_bytes.layer_per_sq_token * sum_sq_tokens
        )
        + cost.activation_bytes.edge_fixed
        + cost.activation_bytes.edge_per_token * num_tokens
        + cost.activation_bytes.edge_per_item * num_items
    else 0 end as activation_bytes,
    cost.median_error_frac,
    not coalesce(
        num_tokens between probed.min_tokens and probed.max_tokens
        and sum_sq_tokens between probed.min_sum_sq_tokens and probed.max_sum_sq_tokens,
        false
    ) as is_extrapolated,
    probed.min_tokens,
    probed.max_tokens,
    probed.min_sum_sq_tokens,
    probed.max_sum_sq_tokens
from v_cost_effective as cost
inner join probed using (table_id);

create or replace macro cost_at(wanted_table_id, num_items, num_tokens, sum_sq_tokens) as table
with estimate as (
    select count(*) as num_tables
    from v_cost_effective
    where table_id = wanted_table_id
)

select
    found.table_id,
    found.module,
    found.tp,
    found.source,
    found.factor,
    found.forward_s,
    found.backward_s,
    found.activation_bytes,
    found.median_error_frac
from estimate
left join cost_estimate(wanted_table_id, num_items, num_tokens, sum_sq_tokens) as found on true
-- In the filter, because a column nobody selects is not computed.
where case
    when estimate.num_tables = 0 then
        error(concat('cost_at: no cost table ', coalesce(wanted_table_id, 'null'), ' in force; see v_cost_effective'))
    when num_items is null or num_tokens is null or sum_sq_tokens is null then
        error('cost_at: num_items, num_tokens and sum_sq_tokens must not be null')
    when found.is_extrapolated then
        error(concat(
            'cost_at: ', num_tokens, ' tokens, ', sum_sq_tokens, ' squared, lie outside the probes of ',
            found.module, ': tokens ',
            coalesce(found.min_tokens || ' to ' || found.max_tokens, 'never probed'), ', squared ',
            coalesce(found.min_sum_sq_tokens || ' to ' || found.max_sum_sq_tokens, 'never probed'),
            '; cost_estimate(...) extrapolates'
        ))
    else true
end;

comment on macro table cost_estimate is -- noqa: PRS
'Seconds and bytes of a whole module on one microbatch, corrected; is_extrapolated: outside the probes. One row.';
comment on macro table cost_at is
'cost_estimate that raises an error outside the probed tokens, for an unknown table and for null. One row.';

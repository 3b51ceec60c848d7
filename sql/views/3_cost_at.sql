-- noqa: disable=LT02,RF02,RF04
-- Seconds and bytes of a whole module (all its layers and its edge) on one microbatch, correction included: the formula
-- of dflop/cost/curve.py. cost_estimate answers anything and says whether it had to extrapolate beyond the probes, as
-- dflop/cost/model.py does; cost_at answers only inside the probed tokens and mean lengths and raises an error
-- outside, for a table it does not know and for a null. An error's text is concatenated with concat(), for which null
-- is empty: error(null) raises nothing.
create or replace macro cost_estimate(wanted_table_id, num_items, num_tokens, sum_sq_tokens) as table
-- As columns, because a parameter that comes from another table (lateral) is not seen inside a list comprehension.
with asked as (
    select
        num_items as items,
        num_tokens as tokens,
        sum_sq_tokens as squares
)

select
    cost.table_id,
    cost.module,
    cost.tp,
    cost.source,
    cost.factor,
    case when asked.tokens > 0 then
        cost.num_layers * (
            cost.forward_s.layer_fixed
            + cost.forward_s.layer_per_token * asked.tokens
            + cost.forward_s.layer_per_sq_token * asked.squares
            + coalesce(list_sum([
                part[1] * least(part[2], asked.tokens)
                for part in list_zip(cost.forward_s.layer_bends, cost.forward_s.layer_knots)
            ]), 0)
        )
        + cost.forward_s.edge_fixed
        + cost.forward_s.edge_per_token * asked.tokens
        + cost.forward_s.edge_per_item * asked.items
    else 0 end as forward_s,
    case when asked.tokens > 0 then
        cost.num_layers * (
            cost.backward_s.layer_fixed
            + cost.backward_s.layer_per_token * asked.tokens
            + cost.backward_s.layer_per_sq_token * asked.squares
            + coalesce(list_sum([
                part[1] * least(part[2], asked.tokens)
                for part in list_zip(cost.backward_s.layer_bends, cost.backward_s.layer_knots)
            ]), 0)
        )
        + cost.backward_s.edge_fixed
        + cost.backward_s.edge_per_token * asked.tokens
        + cost.backward_s.edge_per_item * asked.items
    else 0 end as backward_s,
    case when asked.tokens > 0 then
        cost.num_layers * (
            cost.activation_bytes.layer_fixed
            + cost.activation_bytes.layer_per_token * asked.tokens
            + cost.activation_bytes.layer_per_sq_token * asked.squares
            + coalesce(list_sum([
                part[1] * least(part[2], asked.tokens)
                for part in list_zip(cost.activation_bytes.layer_bends, cost.activation_bytes.layer_knots)
            ]), 0)
        )
        + cost.activation_bytes.edge_fixed
        + cost.activation_bytes.edge_per_token * asked.tokens
        + cost.activation_bytes.edge_per_item * asked.items
    else 0 end as activation_bytes,
    cost.median_error_frac,
    asked.tokens > 0 and not (
        asked.tokens between cost.min_tokens and cost.max_tokens
        and asked.squares <= cost.max_mean_length * asked.tokens * (1 + 1e-12)
    ) as is_extrapolated,
    cost.min_tokens,
    cost.max_tokens,
    cost.max_mean_length
from v_cost_effective as cost
cross join asked
where cost.table_id = wanted_table_id;

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
        error(concat('cost_at: no cost table ', coalesce(wanted_table_id, 'null'), '; see v_cost_effective'))
    when num_items is null or num_tokens is null or sum_sq_tokens is null then
        error('cost_at: num_items, num_tokens and sum_sq_tokens must not be null')
    when found.is_extrapolated then
        error(concat(
            'cost_at: ', num_tokens, ' tokens, ', sum_sq_tokens, ' squared, lie outside the probes of ',
            found.module, ': ',
            case when found.max_tokens = 0 then 'never probed' else concat(
                'tokens ', found.min_tokens, ' to ', found.max_tokens,
                ', mean length up to ', round(found.max_mean_length, 1)
            ) end,
            '; cost_estimate(...) extrapolates'
        ))
    else true
end;

comment on macro table cost_estimate is -- noqa: PRS
'Seconds and bytes of a whole module on one microbatch, corrected; is_extrapolated: outside the probes. One row.';
comment on macro table cost_at is
'cost_estimate that raises an error outside the probes, for an unknown table and for null. One row.';

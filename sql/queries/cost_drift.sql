-- purpose: what modules and links cost in one model profile and in another
-- parameters: $before varchar, model profile; $after varchar, the other model profile
-- grain: one row per module, tp and way of running; one per link operation, ranks and nodes; null where one lacks it
-- units: seconds per layer and million tokens (modules, corrected), or per 64 MiB (links); change_ratio: after / before
with cost as (
    select
        profile_key,
        'module' as what,
        concat(
            module, ' tp ', tp, case trains when 'none' then ' frozen' when 'projector' then ' projector' else '' end,
            case when recompute then ' recompute' else '' end
        ) as subject,
        hardware,
        corrected_s_per_layer_mtoken as cost_s,
        median_error_frac
    from v_cost_history
    where is_latest and profile_key in ($before, $after)
    union all by name
    select
        profile_key,
        'link' as what,
        concat(op, ' ', num_ranks, ' ranks on ', num_nodes, case when num_nodes = 1 then ' node' else ' nodes' end)
            as subject,
        hardware,
        latency_s + 67108864 / bytes_per_s as cost_s,
        median_error_frac
    from v_link_cost_latest
    where profile_key in ($before, $after)
)

select
    what,
    subject,
    max(hardware) filter (where profile_key = $before) as hardware_before,
    max(hardware) filter (where profile_key = $after) as hardware_after,
    max(cost_s) filter (where profile_key = $before) as before_s,
    max(cost_s) filter (where profile_key = $after) as after_s,
    after_s / nullif(before_s, 0) as change_ratio,
    max(median_error_frac) as median_error_frac
from cost
group by what, subject
order by what desc, subject asc;

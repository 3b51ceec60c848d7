-- Fits from before their time was recorded are dated by the profile record of the run that made them.
create or replace view v_link_cost_latest as
with dated as (
    select
        profile_key,
        run_id as _run_id,
        max(created_at_s) as created_at_s
    from profile_record
    group by all
)

select
    link_cost.* exclude (fitted_at_s), -- noqa: RF02
    utc(nullif(link_cost.fitted_at_s, 0)) as fitted_at
from link_cost
left join dated on link_cost.profile_key = dated.profile_key and link_cost._run_id = dated._run_id
qualify
    row_number() over (
        partition by
            link_cost.profile_key, link_cost.op, link_cost.num_ranks, link_cost.num_nodes,
            link_cost.hardware, link_cost.software
        order by
            link_cost.source = 'measured' desc,
            coalesce(nullif(link_cost.fitted_at_s, 0), dated.created_at_s) desc nulls last,
            link_cost._run_id desc, link_cost._producer desc, link_cost._seq desc, link_cost.rowid desc
    ) = 1;

comment on view v_link_cost_latest is
'Current link costs, measured before analytic. Grain: profile_key, op, num_ranks, num_nodes, hardware, software.';
comment on column v_link_cost_latest.profile_key is 'model profile it was fitted to';
comment on column v_link_cost_latest.fitted_at is 'when it was fitted; null: not recorded; UTC';

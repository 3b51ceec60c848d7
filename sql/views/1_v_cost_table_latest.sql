-- Fits from before their time was recorded are dated by the profile record of the run that made them.
create or replace view v_cost_table_latest as
with dated as (
    select
        profile_key,
        run_id as _run_id,
        max(created_at_s) as created_at_s
    from profile_record
    group by all
)

select
    cost_table.* exclude (fitted_at_s), -- noqa: RF02
    utc(nullif(cost_table.fitted_at_s, 0)) as fitted_at
from cost_table
left join dated on cost_table.profile_key = dated.profile_key and cost_table._run_id = dated._run_id
qualify
    row_number() over (
        partition by
            cost_table.profile_key, cost_table.module, cost_table.tp,
            cost_table.hardware, cost_table.software, cost_table.dtype,
            cost_table.trains, cost_table.recompute, coalesce(cost_table.fp8, 'off')
        order by
            cost_table.source = 'measured' desc, cost_table.source = 'derived' asc,
            coalesce(nullif(cost_table.fitted_at_s, 0), dated.created_at_s) desc nulls last,
            cost_table._run_id desc, cost_table._producer desc, cost_table._seq desc, cost_table.rowid desc
    ) = 1;

comment on view v_cost_table_latest is
'Current cost tables, measured before analytic before derived. '
'Grain: profile_key, module, tp, hardware, software, dtype, trains, recompute, fp8.';
comment on column v_cost_table_latest.profile_key is 'model profile it was fitted to';
comment on column v_cost_table_latest.source is 'measured, derived (of a table of another tp) or analytic';
comment on column v_cost_table_latest.fitted_at is 'when it was fitted; null: not recorded; UTC';

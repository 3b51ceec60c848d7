-- A cost table has no time of its own: the profile record of the run that fitted it dates it.
create or replace view v_cost_table_latest as
with dated as (
    select
        profile_key,
        run_id as _run_id,
        max(created_at_s) as created_at_s
    from profile_record
    group by all
)

select cost_table.*
from cost_table
left join dated using (profile_key, _run_id)
qualify
    row_number() over (
        partition by profile_key, module, tp, hardware, software, dtype
        order by
            source = 'measured' desc, dated.created_at_s desc nulls last,
            _run_id desc, _producer desc, _seq desc, cost_table.rowid desc
    ) = 1;

comment on view v_cost_table_latest is
'Cost tables in force, measured before analytic. Grain: one row per profile_key, module, tp, hardware, software, dtype.';

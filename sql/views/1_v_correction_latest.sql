-- The buckets of a set are written together but may come in two files: a set counts once it covers every size, which
-- is when the ends of its buckets exceed their beginnings by all sizes there are. Rows may have been written twice.
create or replace view v_correction_latest as
with newest as (
    select
        table_id,
        module,
        run_id,
        effective_step,
        observed_at_s
    from correction
    group by table_id, module, run_id, effective_step, observed_at_s
    having sum(distinct max_tokens) - sum(distinct min_tokens) = 9007199254740992
    qualify
        row_number() over (
            partition by table_id, module order by observed_at_s desc, effective_step desc, run_id desc
        ) = 1
)

select
    correction.* exclude (observed_at_s),
    utc(correction.observed_at_s) as observed_at
from correction
inner join newest using (table_id, module, run_id, effective_step, observed_at_s)
qualify
    row_number() over (
        partition by correction.table_id, correction.module, correction.min_tokens
        order by correction._producer desc, correction._seq desc, correction.rowid desc
    ) = 1;

comment on view v_correction_latest is
'The newest complete set of corrections of every cost table, over all runs. '
'Grain: table_id, module, min_tokens. Ratios.';

create or replace view v_correction_latest as
select *
from correction
qualify
    row_number() over (
        partition by table_id, module
        order by observed_at_s desc, effective_step desc, run_id desc, _producer desc, _seq desc, rowid desc
    ) = 1;

comment on view v_correction_latest is
'Correction in force for every cost table, over all runs. Grain: one row per table_id, module. factor: ratio.';

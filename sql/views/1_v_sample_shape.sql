-- A profile that was killed and repeated has written some samples twice, with equal content: keep one of each.
create or replace view v_sample_shape as
select *
from sample_shape
qualify
    row_number() over (
        partition by profile_key, sample_index
        order by _run_id desc, _producer desc, _seq desc, rowid desc
    ) = 1;

comment on view v_sample_shape is 'Samples of every data profile. Grain: one row per profile_key, sample_index.';

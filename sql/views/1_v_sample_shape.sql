-- A profile that was killed and repeated has written some samples twice, with equal content: keep one of each. Only
-- those pass through more than a count: a window over all takes ten times as long.
create or replace view v_sample_shape as
with repeated as (
    select
        profile_key,
        sample_index
    from sample_shape
    group by profile_key, sample_index
    having count(*) > 1
),

newest as (
    select
        profile_key,
        sample_index,
        arg_max(copied.rowid, row(copied._run_id, copied._producer, copied._seq, copied.rowid)) as place
    from sample_shape as copied
    inner join repeated using (profile_key, sample_index)
    group by profile_key, sample_index
)

select sample_shape.*
from sample_shape
left join newest using (profile_key, sample_index)
where newest.place is null or newest.place = sample_shape.rowid;

comment on view v_sample_shape is 'Samples of every data profile. Grain: one row per profile_key, sample_index.';

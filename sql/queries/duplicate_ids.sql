-- purpose: sample ids that several rows of a dataset share; all of them are trained on
-- parameters: $profile_key varchar, data profile
-- grain: one row per id that occurs more than once
-- units: none
with sample as (
    select
        sample_id,
        sample_index
    from v_sample_shape
    where profile_key = $profile_key
    union
    select
        sample_id,
        sample_index
    from quarantined_sample
    where profile_key = $profile_key and phase = 'profile'
)

select
    sample_id,
    count(*) as num_rows,
    min(sample_index) as first_sample_index
from sample
where sample_id != ''
group by sample_id
having count(*) > 1
order by num_rows desc, sample_id asc;

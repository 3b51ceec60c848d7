-- purpose: data profiles, newest first: dataset, samples, skipped samples, media limits with their origins
-- parameters: none
-- grain: one row per data profile
-- units: seconds; UTC
select
    profile_key,
    inputs ->> 'family' as model_family,
    inputs ->> 'annotations' as annotations,
    inputs ->> 'limits' as media_limits,
    num_rows as num_samples,
    num_quarantined,
    elapsed_s,
    utc(created_at_s) as created_at,
    run_id
from profile_record
where kind = 'data'
qualify row_number() over (partition by profile_key order by created_at_s desc) = 1
order by created_at desc;

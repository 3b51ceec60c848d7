-- purpose: model profiles, newest first: model, hardware, number of probes, duration
-- parameters: none
-- grain: one row per model profile
-- units: seconds; UTC
select
    profile_key,
    inputs ->> 'family' as model_family,
    inputs ->> 'hardware' as hardware,
    inputs ->> 'software' as software,
    inputs ->> 'dtype' as dtype,
    num_rows as num_measurements,
    elapsed_s,
    utc(created_at_s) as created_at,
    run_id
from profile_record
where kind = 'model'
qualify row_number() over (partition by profile_key order by created_at_s desc) = 1
order by created_at desc;

-- purpose: data and model profiles over time, with what changed against the one before
-- parameters: none
-- grain: one row per profile
-- units: UTC
select
    kind,
    first_at,
    profile_key,
    num_rows,
    num_quarantined,
    changed,
    run_id
from v_profile_history
order by kind, first_at, profile_key;

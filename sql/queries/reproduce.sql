-- purpose: inputs that a run read from the store, and the snapshot to rebuild to reproduce them
-- parameters: $run_id varchar, the run
-- grain: one row per job and attempt
-- units: none
select
    job,
    attempt,
    snapshot_seq,
    published_at,
    snapshot_revision,
    data_profile_key,
    model_profile_key,
    table_ids
from v_run_input
where run_id = $run_id
order by observed_at, job;

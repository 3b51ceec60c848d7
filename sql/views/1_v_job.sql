create or replace view v_job as
select
    run_id,
    job_name,
    attempt,
    state,
    reason,
    backend,
    job_id,
    job_key,
    folder,
    num_tasks,
    min(observed_at_s) over (partition by run_id, job_name, attempt) as submitted_at_s,
    observed_at_s
from job_record
qualify
    row_number() over (
        partition by run_id, job_name, attempt
        order by observed_at_s desc, _producer desc, _seq desc, rowid desc
    ) = 1;

comment on view v_job is
'Latest state of every job. Grain: one row per run_id, job_name, attempt. Times: seconds since the epoch.';

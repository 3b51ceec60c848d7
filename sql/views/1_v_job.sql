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
    utc(min(observed_at_s) over (partition by run_id, job_name, attempt)) as submitted_at,
    utc(observed_at_s) as observed_at
from job_record
qualify
    row_number() over (
        partition by run_id, job_name, attempt
        order by observed_at_s desc, _producer desc, _seq desc, rowid desc
    ) = 1;

comment on view v_job is
'Latest state of every job. Grain: one row per run_id, job_name, attempt.';
comment on column v_job.state is 'newest state, in the launcher''s words';
comment on column v_job.observed_at is 'when that state was seen, UTC';
comment on column v_job.submitted_at is 'when the first state of this attempt was seen, UTC';

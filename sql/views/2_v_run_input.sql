create or replace view v_run_input as
select
    run_input.run_id,
    run_input.job,
    run_input.attempt,
    run_input.snapshot_seq,
    utc(publish_log.published_at_s) as published_at,
    run_input.snapshot_revision,
    run_input.data_profile_key,
    run_input.model_profile_key,
    run_input.table_ids,
    utc(run_input.observed_at_s) as observed_at
from run_input
left join publish_log on run_input.snapshot_seq = publish_log.seq
qualify
    row_number() over (
        partition by run_input.run_id, run_input.job, run_input.attempt
        order by run_input.observed_at_s desc, run_input._producer desc, run_input._seq desc, run_input.rowid desc
    ) = 1;

comment on view v_run_input is
'Which snapshot, profiles and cost tables each job of a run read. Grain: one row per run_id, job, attempt.';
comment on column v_run_input.run_id is 'run';
comment on column v_run_input.published_at is 'when that snapshot was made, UTC';

create or replace view v_run as
select
    run_id,
    name,
    state,
    config_key,
    hardware,
    software,
    code_rev,
    run_dir,
    owner,
    utc(min(observed_at_s) over (partition by run_id)) as started_at,
    utc(observed_at_s) as observed_at
from run_record
qualify row_number() over (partition by run_id order by observed_at_s desc, _producer desc, _seq desc, rowid desc) = 1;

comment on view v_run is 'Latest state of every run. Grain: one row per run_id.';
comment on column v_run.started_at is 'when its first state was seen, UTC';
comment on column v_run.observed_at is 'when its newest state was seen, UTC';

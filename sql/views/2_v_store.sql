create or replace view v_store as
with held as (
    select
        kind,
        count(*) as num_files,
        sum(num_rows)::bigint as num_rows,
        sum(num_bytes)::bigint as num_bytes,
        count(distinct run_id) as num_runs,
        utc(max(ingested_at_s)) as last_ingested_at
    from ingest_manifest
    group by all
),

refused as (
    select
        split_part(path, '/', 1) as kind,
        count(*) as num_refused_files,
        utc(max(quarantined_at_s)) as last_refused_at
    from file_quarantine
    group by all
)

select
    kind,
    coalesce(held.num_files, 0) as num_files,
    coalesce(held.num_rows, 0) as num_rows,
    coalesce(held.num_bytes, 0) as num_bytes,
    coalesce(held.num_runs, 0) as num_runs,
    held.last_ingested_at,
    coalesce(refused.num_refused_files, 0) as num_refused_files,
    refused.last_refused_at
from held
full outer join refused using (kind);

comment on view v_store is
'Contents of the store, and rejected files (see v_quarantine). Grain: one row per kind. '
'Bytes are those of the spool files.';
comment on column v_store.kind is 'kind of record, the table it goes to';
comment on column v_store.num_files is 'ingested spool files';
comment on column v_store.num_rows is 'rows of these files';
comment on column v_store.num_bytes is 'size of these files, bytes';
comment on column v_store.num_runs is 'number of runs';
comment on column v_store.last_ingested_at is 'when the newest was ingested, UTC';
comment on column v_store.num_refused_files is 'spool files that failed a check';
comment on column v_store.last_refused_at is 'when the newest was rejected, UTC';

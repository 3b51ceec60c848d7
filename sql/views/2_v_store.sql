create or replace view v_store as
select
    kind,
    count(*) as num_files,
    sum(num_rows)::bigint as num_rows,
    sum(num_bytes)::bigint as num_bytes,
    count(distinct run_id) as num_runs,
    max(ingested_at_s) as last_ingested_at_s
from ingest_manifest
group by all;

comment on view v_store is
'What the store holds. Grain: one row per kind. Bytes are those of the spool files.';

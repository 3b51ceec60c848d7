create or replace view v_snapshot as
select
    publish_log.seq as snapshot_seq,
    utc(publish_log.published_at_s) as published_at,
    publish_log.duckdb_version,
    publish_log.revision,
    count(manifest.kind) as num_new_files,
    coalesce(sum(manifest.num_rows), 0)::bigint as num_new_rows,
    list(distinct manifest.kind order by manifest.kind) filter (where manifest.kind is not null) as new_kinds
from publish_log
left join ingest_manifest as manifest on publish_log.seq = manifest.snapshot_seq
group by all;

comment on view v_snapshot is
'What each snapshot added. Grain: one row per snapshot. dflop store rebuild restores any of them.';
comment on column v_snapshot.snapshot_seq is 'number of the snapshot';
comment on column v_snapshot.num_new_files is 'spool files that it added';
comment on column v_snapshot.num_new_rows is 'rows of these files';
comment on column v_snapshot.new_kinds is 'kinds of these rows';

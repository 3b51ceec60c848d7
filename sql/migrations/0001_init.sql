-- The books of the store itself: what was ingested, refused, published and migrated.

create table ingest_manifest (
    kind varchar not null,
    run_id varchar not null,
    producer varchar not null,
    seq bigint not null,
    sha256 varchar not null,
    num_bytes bigint not null,
    mtime_ns bigint not null,
    num_rows bigint not null,
    ingested_at_s double not null,
    primary key (kind, run_id, producer, seq)
);

comment on table ingest_manifest is
'Spool files whose rows are in this database; written in the same transaction as the rows.';
comment on column ingest_manifest.kind is 'table the rows went to';
comment on column ingest_manifest.run_id is 'run of the file';
comment on column ingest_manifest.producer is 'producer of the file';
comment on column ingest_manifest.seq is 'number of the file within its producer';
comment on column ingest_manifest.sha256 is 'hash of the file''s bytes';
comment on column ingest_manifest.num_bytes is 'size of the file, bytes';
comment on column ingest_manifest.mtime_ns is 'modification time of the file, nanoseconds since the epoch';
comment on column ingest_manifest.num_rows is 'rows of the file';
comment on column ingest_manifest.ingested_at_s is 'when it was ingested, seconds since the epoch (UTC)';

create table file_quarantine (
    path varchar not null,
    sha256 varchar not null,
    num_bytes bigint not null,
    reason varchar not null,
    quarantined_at_s double not null,
    primary key (path, sha256)
);

comment on table file_quarantine is
'Spool files that failed a check and moved to <store>/quarantine; their rows are not in this database.';
comment on column file_quarantine.path is 'path below spool/ (and, with a hash suffix, below quarantine/)';
comment on column file_quarantine.sha256 is 'hash of the file''s bytes';
comment on column file_quarantine.num_bytes is 'size of the file, bytes';
comment on column file_quarantine.reason is 'the check that failed';
comment on column file_quarantine.quarantined_at_s is 'when it was found, seconds since the epoch (UTC)';

create table publish_log (
    seq bigint not null,
    published_at_s double not null,
    duckdb_version varchar not null,
    primary key (seq)
);

comment on table publish_log is
'Snapshots made from this database; a row whose file is missing is a publish that died or was cleaned up.';
comment on column publish_log.seq is 'number of the snapshot';
comment on column publish_log.published_at_s is 'when it was made, seconds since the epoch (UTC)';
comment on column publish_log.duckdb_version is 'duckdb that wrote it';

create table schema_migration (
    version bigint not null,
    name varchar not null,
    sha256 varchar not null,
    applied_at_s double not null,
    primary key (version)
);

comment on table schema_migration is
'Migrations of sql/migrations that ran on this database.';
comment on column schema_migration.version is 'number of the file';
comment on column schema_migration.name is 'name of the file';
comment on column schema_migration.sha256 is 'hash of the file when it ran; edited files are refused';
comment on column schema_migration.applied_at_s is 'when it ran, seconds since the epoch (UTC)';

create table store_meta (
    key varchar not null,
    value varchar not null,
    primary key (key)
);

comment on table store_meta is
'Facts about this database: revision (identity of its content), duckdb_version (last writer), views_sha256.';
comment on column store_meta.key is 'name of the fact';
comment on column store_meta.value is 'its value';

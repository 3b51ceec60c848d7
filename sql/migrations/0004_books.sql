-- The store's books, second part: which snapshot first held a file, which runs' roll-ups are out of date,
-- what jobs read.

alter table ingest_manifest add column snapshot_seq bigint;
comment on column ingest_manifest.snapshot_seq is 'first snapshot that holds the file; null until it is published';

alter table publish_log add column revision varchar;
comment on column publish_log.revision is 'content identity of the snapshot; null for those published by dflop 0.1';

create table dirty_run (
    run_id varchar not null,
    primary key (run_id)
);

comment on table dirty_run is
'Runs whose observations arrived after their roll-ups were computed; empty in every snapshot.';
comment on column dirty_run.run_id is 'run; <run_id>/compare for comparison steps';

create table run_input (
    run_id varchar not null,
    job varchar not null,
    attempt bigint not null,
    snapshot_seq bigint not null,
    snapshot_revision varchar not null,
    data_profile_key varchar not null,
    model_profile_key varchar not null,
    table_ids varchar[] not null,
    observed_at_s double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table run_input is
'What a job of a run read from the store before it decided anything; `dflop store rebuild --snapshot` gives it again.';
comment on column run_input.run_id is 'run the job belongs to';
comment on column run_input.job is 'plan, train or compare';
comment on column run_input.attempt is '0, then one more per restart of the job';
comment on column run_input.snapshot_seq is 'number of the snapshot that was read';
comment on column run_input.snapshot_revision is 'content identity of that snapshot';
comment on column run_input.data_profile_key is 'data profile the samples came from';
comment on column run_input.model_profile_key is 'model profile the costs came from';
comment on column run_input.table_ids is 'cost tables that were used';
comment on column run_input.observed_at_s is 'when it was read, seconds since the epoch (UTC)';
comment on column run_input._run_id is 'run of the spool file the row came from';
comment on column run_input._producer is 'producer of the spool file the row came from';
comment on column run_input._seq is 'number of the spool file within its producer';

create table archive_manifest (
    path varchar not null,
    sha256 varchar not null,
    num_bytes bigint not null,
    mtime_ns bigint not null,
    num_files bigint not null,
    num_rows bigint not null,
    ingested_at_s double not null,
    primary key (path)
);

comment on table archive_manifest is
'Compacted files of <store>/archive whose spool files are all in ingest_manifest.';
comment on column archive_manifest.path is 'path below archive/';
comment on column archive_manifest.sha256 is 'hash of the file''s bytes';
comment on column archive_manifest.num_bytes is 'size of the file, bytes';
comment on column archive_manifest.mtime_ns is 'modification time of the file, nanoseconds since the epoch';
comment on column archive_manifest.num_files is 'spool files that were compacted into it';
comment on column archive_manifest.num_rows is 'rows of the file';
comment on column archive_manifest.ingested_at_s is 'when this database took note of it, seconds since the epoch (UTC)';

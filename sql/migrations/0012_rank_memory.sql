-- The most memory that ranks held, beside what plans predict.

create table rank_memory (
    run_id varchar not null,
    attempt bigint not null,
    step bigint not null,
    rank bigint not null,
    module varchar not null,
    stage bigint not null,
    dp_rank bigint not null,
    tp_rank bigint not null,
    kind varchar not null,
    peak_bytes bigint not null,
    observed_at_s double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table rank_memory is
'The most memory a rank has held so far; a new row when it has become more. v_rank_memory has the latest.';
comment on column rank_memory.run_id is 'run; <run_id>/compare for comparison steps';
comment on column rank_memory.attempt is '0, then one more per restart of the training job';
comment on column rank_memory.step is 'optimizer step after which it was read';
comment on column rank_memory.rank is 'global rank';
comment on column rank_memory.module is 'module whose grid the rank is in';
comment on column rank_memory.stage is 'pipeline stage within the grid';
comment on column rank_memory.dp_rank is 'data parallel rank within the grid';
comment on column rank_memory.tp_rank is 'tensor parallel rank within the grid';
comment on column rank_memory.kind is
'allocated: what torch held on the device, as plans predict it; process: all of the process, where it has no device';
comment on column rank_memory.peak_bytes is 'the most so far since the process began, bytes';
comment on column rank_memory.observed_at_s is 'when it was read, seconds since the epoch (UTC)';
comment on column rank_memory._run_id is 'run of the spool file the row came from';
comment on column rank_memory._producer is 'producer of the spool file the row came from';
comment on column rank_memory._seq is 'number of the spool file within its producer';

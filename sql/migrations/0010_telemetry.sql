-- What ranks did in traced steps, and the arithmetic of a step beside what its devices could do.

create table rank_span (
    run_id varchar not null,
    attempt bigint not null,
    step bigint not null,
    rank bigint not null,
    module varchar not null,
    stage bigint not null,
    dp_rank bigint not null,
    tp_rank bigint not null,
    name varchar not null,
    microbatch bigint not null,
    start_s double not null,
    duration_s double not null,
    num_bytes bigint not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table rank_span is
'One thing a rank did in a traced step (train.trace_every_steps). See v_rank_time.';
comment on column rank_span.run_id is 'run; <run_id>/compare for comparison steps';
comment on column rank_span.attempt is '0, then one more per restart of the training job';
comment on column rank_span.step is 'optimizer step';
comment on column rank_span.rank is 'global rank';
comment on column rank_span.module is 'module whose grid the rank is in';
comment on column rank_span.stage is 'pipeline stage within the grid';
comment on column rank_span.dp_rank is 'data parallel rank within the grid';
comment on column rank_span.tp_rank is 'tensor parallel rank within the grid';
comment on column rank_span.name is
'forward, backward, receive_wait, send, reduce, optimizer; before the step data_wait and, in another thread, '
'schedule_wait; after it checkpoint';
comment on column rank_span.microbatch is 'microbatch; -1 for what belongs to the whole step';
comment on column rank_span.start_s is 'start, seconds from the start of the step; negative before it';
comment on column rank_span.duration_s is 'wall time, seconds';
comment on column rank_span.num_bytes is 'bytes received or handed over to be sent; 0 for everything else';
comment on column rank_span._run_id is 'run of the spool file the row came from';
comment on column rank_span._producer is 'producer of the spool file the row came from';
comment on column rank_span._seq is 'number of the spool file within its producer';

create table step_flops (
    run_id varchar not null,
    attempt bigint not null,
    step bigint not null,
    model_flops double not null,
    peak_flops_per_s double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table step_flops is 'Arithmetic of a global batch, as rank 0 counted it. See v_step.';
comment on column step_flops.run_id is 'run; <run_id>/compare for comparison steps';
comment on column step_flops.attempt is '0, then one more per restart of the training job';
comment on column step_flops.step is 'optimizer step';
comment on column step_flops.model_flops is
'floating point operations of the model''s matmuls and attention, forward and backward, without recomputation';
comment on column step_flops.peak_flops_per_s is
'peak of all devices of the plan together, per second; NaN where no data sheet is known';
comment on column step_flops._run_id is 'run of the spool file the row came from';
comment on column step_flops._producer is 'producer of the spool file the row came from';
comment on column step_flops._seq is 'number of the spool file within its producer';

alter table step_rollup add column model_flops double;
alter table step_rollup add column peak_flops_per_s double;

comment on column step_rollup.model_flops is
'floating point operations of the model, forward and backward; null where nobody counted';
comment on column step_rollup.peak_flops_per_s is 'peak of all devices together, per second; null where unknown';

create table span_rollup (
    run_id varchar not null,
    rank bigint not null,
    module varchar not null,
    stage bigint not null,
    dp_rank bigint not null,
    tp_rank bigint not null,
    name varchar not null,
    num_steps bigint not null,
    num_spans bigint not null,
    duration_s double not null,
    num_bytes double not null,
    step_s double not null
);

comment on table span_rollup is
'What each rank did in its traced steps. Grain: one row per run_id, rank and its seat, name. See v_rank_time.';
comment on column span_rollup.run_id is 'run; <run_id>/compare for comparison steps';
comment on column span_rollup.rank is 'global rank';
comment on column span_rollup.module is 'module whose grid the rank is in';
comment on column span_rollup.stage is 'pipeline stage within the grid';
comment on column span_rollup.dp_rank is 'data parallel rank within the grid';
comment on column span_rollup.tp_rank is 'tensor parallel rank within the grid';
comment on column span_rollup.name is 'what it did, see rank_span.name';
comment on column span_rollup.num_steps is 'traced steps of the rank';
comment on column span_rollup.num_spans is 'how often it did that in them';
comment on column span_rollup.duration_s is 'time it took, seconds';
comment on column span_rollup.num_bytes is 'bytes received or handed over to be sent';
comment on column span_rollup.step_s is 'length of the traced steps, seconds';

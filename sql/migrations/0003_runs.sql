-- What runs planned and what they saw: runs, jobs, plans, steps, corrections.
--
-- Columns are the fields of the records in dflop/records/, in order and with the same names; nested records are
-- structs, tuples are lists. _run_id, _producer and _seq name the spool file a row came from (join ingest_manifest).
-- Tables are append-only: what changes over time is a new row, and a view picks the latest.

create table run_record (
    run_id varchar not null,
    name varchar not null,
    config_key varchar not null,
    state varchar not null,
    hardware varchar not null,
    software varchar not null,
    code_rev varchar not null,
    run_dir varchar not null,
    observed_at_s double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table run_record is
'One run of the pipeline; a new row per change of state. v_run has the latest.';
comment on column run_record.run_id is 'identity of the run; also the name of its run directory';
comment on column run_record.name is 'name given in the configuration';
comment on column run_record.config_key is 'hash of the resolved configuration; equal for repeats';
comment on column run_record.state is 'running, done or failed';
comment on column run_record.hardware is 'devices the run used, as the model profile names them';
comment on column run_record.software is 'versions that influence timings (torch, attention kernel, ...)';
comment on column run_record.code_rev is 'version or commit of dflop';
comment on column run_record.run_dir is 'directory with logs, plan, checkpoints and report';
comment on column run_record.observed_at_s is 'when the state was seen, seconds since the epoch (UTC)';
comment on column run_record._run_id is 'run of the spool file the row came from';
comment on column run_record._producer is 'producer of the spool file the row came from';
comment on column run_record._seq is 'number of the spool file within its producer';

create table job_record (
    run_id varchar not null,
    job_name varchar not null,
    job_key varchar not null,
    backend varchar not null,
    job_id varchar not null,
    state varchar not null,
    reason varchar not null,
    folder varchar not null,
    num_tasks bigint not null,
    attempt bigint not null,
    observed_at_s double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table job_record is
'One job and what became of it; a new row per change of state. v_job has the latest.';
comment on column job_record.run_id is 'run the job belongs to';
comment on column job_record.job_name is 'step of the pipeline: data, model, train, ...';
comment on column job_record.job_key is
'hash of what the job computes; a live job with the same key is adopted, not repeated';
comment on column job_record.backend is 'launcher backend: inline, local or slurm';
comment on column job_record.job_id is 'id given by the backend (Slurm job id, process id)';
comment on column job_record.state is 'state at observed_at_s, in the launcher''s words';
comment on column job_record.reason is 'why it is in that state; empty when nothing is wrong';
comment on column job_record.folder is 'directory with the job''s script and logs';
comment on column job_record.num_tasks is 'number of processes';
comment on column job_record.attempt is '0 for the first submission, then one more per resubmission';
comment on column job_record.observed_at_s is 'when the state was seen, seconds since the epoch (UTC)';
comment on column job_record._run_id is 'run of the spool file the row came from';
comment on column job_record._producer is 'producer of the spool file the row came from';
comment on column job_record._seq is 'number of the spool file within its producer';

create table plan (
    plan_id varchar not null,
    run_id varchar not null,
    candidate_rank bigint not null,
    layout varchar not null,
    modules struct(
        module varchar,
        parallel struct(tp bigint, pp bigint, dp bigint),
        first_rank bigint,
        layers_per_stage bigint[],
        stage_memory_bytes bigint[]
    )[] not null,
    num_microbatches bigint not null,
    global_batch_size bigint not null,
    formula_step_s double not null,
    predicted_step_s double not null,
    baseline_step_s double not null,
    table_ids varchar[] not null,
    snapshot_seq bigint not null,
    reason varchar not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table plan is
'A layout of the model on the cluster and what it was predicted to take; runners-up are kept. v_plan is readable.';
comment on column plan.plan_id is 'identity of the plan';
comment on column plan.run_id is 'run it was made for';
comment on column plan.candidate_rank is '0 is the plan that runs, higher ranks are runners-up';
comment on column plan.layout is 'split: every module has its own processes';
comment on column plan.modules is
'per module: degrees, first global rank, layers per stage, predicted peak bytes per process of each stage';
comment on column plan.num_microbatches is 'microbatches per global batch';
comment on column plan.global_batch_size is 'samples per optimizer step';
comment on column plan.formula_step_s is 'objective of the mixed-integer program, seconds';
comment on column plan.predicted_step_s is 'mean simulated step with the scheduler that will run, seconds';
comment on column plan.baseline_step_s is
'mean simulated step of the same layout with data-blind microbatches, seconds';
comment on column plan.table_ids is 'cost tables it was computed from';
comment on column plan.snapshot_seq is 'store snapshot the inputs were read from';
comment on column plan.reason is 'why this candidate has this rank';
comment on column plan._run_id is 'run of the spool file the row came from';
comment on column plan._producer is 'producer of the spool file the row came from';
comment on column plan._seq is 'number of the spool file within its producer';

create table step_plan (
    run_id varchar not null,
    step bigint not null,
    policy varchar not null,
    sample_index bigint[] not null,
    num_microbatches bigint not null,
    work struct(
        module varchar,
        item_sample bigint[],
        item_rank_in_sample bigint[],
        item_rows bigint[],
        owner bigint[][][]
    )[] not null,
    num_supervised_tokens bigint not null,
    predicted_step_s double not null,
    arrival_step_s double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table step_plan is
'Which sample runs in which microbatch on which data-parallel rank, in which order. One row per optimizer step.';
comment on column step_plan.run_id is 'run; <run_id>/compare for comparison steps';
comment on column step_plan.step is 'optimizer step';
comment on column step_plan.policy is 'scheduling candidate that won: arrival, balanced, ...';
comment on column step_plan.sample_index is 'global batch in arrival order, rows of the annotation file';
comment on column step_plan.num_microbatches is 'microbatches of the step';
comment on column step_plan.work is
'per module: items, their sample (position in sample_index), rows, owner[microbatch][dp_rank] = item ids';
comment on column step_plan.num_supervised_tokens is 'loss denominator of the whole global batch, tokens';
comment on column step_plan.predicted_step_s is 'simulated step, seconds';
comment on column step_plan.arrival_step_s is 'simulated step of the data-blind order of the same batch, seconds';
comment on column step_plan._run_id is 'run of the spool file the row came from';
comment on column step_plan._producer is 'producer of the spool file the row came from';
comment on column step_plan._seq is 'number of the spool file within its producer';

create table step_observation (
    run_id varchar not null,
    attempt bigint not null,
    step bigint not null,
    policy varchar not null,
    rank bigint not null,
    module varchar not null,
    stage bigint not null,
    dp_rank bigint not null,
    predicted_step_s double not null,
    step_s double not null,
    busy_s double not null,
    data_wait_s double not null,
    schedule_wait_s double not null,
    reduce_s double not null,
    optimizer_s double not null,
    loss double not null,
    grad_norm double not null,
    num_supervised_tokens bigint not null,
    observed_at_s double not null,
    spans struct(
        microbatch bigint,
        num_items bigint,
        num_tokens bigint,
        sum_sq_tokens bigint,
        predicted_forward_s double,
        predicted_backward_s double,
        forward_start_s double,
        forward_s double,
        backward_start_s double,
        backward_s double,
        forward_compute_s double,
        backward_compute_s double
    )[] not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table step_observation is
'What one rank saw of one optimizer step.';
comment on column step_observation.run_id is 'run; <run_id>/compare for comparison steps';
comment on column step_observation.attempt is '0, then one more per restart of the training job';
comment on column step_observation.step is 'optimizer step';
comment on column step_observation.policy is 'scheduling policy of the step plan: arrival, balanced, ...';
comment on column step_observation.rank is 'global rank of the process';
comment on column step_observation.module is 'module the rank works for';
comment on column step_observation.stage is 'pipeline stage within the module';
comment on column step_observation.dp_rank is 'data parallel rank within the module';
comment on column step_observation.predicted_step_s is 'predicted time of the whole step, seconds';
comment on column step_observation.step_s is 'measured time of the whole step on this rank, seconds';
comment on column step_observation.busy_s is 'forward and backward compute, seconds';
comment on column step_observation.data_wait_s is 'waited for decoded data, seconds';
comment on column step_observation.schedule_wait_s is 'waited for the step plan, seconds';
comment on column step_observation.reduce_s is 'gradient reduction, seconds';
comment on column step_observation.optimizer_s is 'optimizer update, seconds';
comment on column step_observation.loss is
'mean loss over the supervised tokens of the global batch; NaN off the last llm stage';
comment on column step_observation.grad_norm is
'norm of the gradient before clipping; NaN where the rank does not know it';
comment on column step_observation.num_supervised_tokens is 'loss denominator of the global batch, tokens';
comment on column step_observation.observed_at_s is 'end of the step, seconds since the epoch (UTC)';
comment on column step_observation.spans is
'per microbatch: load, predicted and measured times; start times count from the start of the step, seconds';
comment on column step_observation._run_id is 'run of the spool file the row came from';
comment on column step_observation._producer is 'producer of the spool file the row came from';
comment on column step_observation._seq is 'number of the spool file within its producer';

create table correction (
    run_id varchar not null,
    effective_step bigint not null,
    module varchar not null,
    table_id varchar not null,
    factor double not null,
    residual_frac double not null,
    num_observations bigint not null,
    observed_at_s double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table correction is
'Multiplicative correction of predicted seconds, learnt by a run. v_correction_latest: the one in force.';
comment on column correction.run_id is 'run that learnt it';
comment on column correction.effective_step is 'first optimizer step planned with it';
comment on column correction.module is 'llm or the name of an encoder';
comment on column correction.table_id is 'cost table it corrects';
comment on column correction.factor is 'multiplies predicted seconds, ratio';
comment on column correction.residual_frac is
'median absolute relative error of the uncorrected prediction in the window, ratio';
comment on column correction.num_observations is 'observations in the window';
comment on column correction.observed_at_s is 'when it was computed, seconds since the epoch (UTC)';
comment on column correction._run_id is 'run of the spool file the row came from';
comment on column correction._producer is 'producer of the spool file the row came from';
comment on column correction._seq is 'number of the spool file within its producer';

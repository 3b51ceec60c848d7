-- Roll-ups: per-run aggregates of the observations, computed by sql/rollups whenever a run has new ones. They hold
-- nothing that the observations do not, and make questions about all history cheap. Views are built on them.

create table step_rollup (
    run_id varchar not null,
    attempt bigint not null,
    step bigint not null,
    policy varchar not null,
    num_ranks bigint not null,
    step_s double not null,
    predicted_step_s double not null,
    busy_s double not null,
    loss double,
    grad_norm double,
    num_supervised_tokens bigint not null,
    observed_at_s double not null,
    num_llm_tokens bigint,
    num_samples bigint
);

comment on table step_rollup is 'Optimizer steps. Grain: one row per run_id, attempt, step, policy. See v_step.';
comment on column step_rollup.run_id is 'run; <run_id>/compare for comparison steps';
comment on column step_rollup.attempt is '0, then one more per restart of the training job';
comment on column step_rollup.step is 'optimizer step';
comment on column step_rollup.policy is 'scheduling policy of the step';
comment on column step_rollup.num_ranks is 'ranks that reported the step';
comment on column step_rollup.step_s is 'measured time of the slowest rank, seconds';
comment on column step_rollup.predicted_step_s is 'predicted time, seconds';
comment on column step_rollup.busy_s is 'forward and backward time summed over ranks, seconds';
comment on column step_rollup.loss is 'mean loss over supervised tokens; null where no rank knows it';
comment on column step_rollup.grad_norm is 'norm of the gradient before clipping; null where no rank knows it';
comment on column step_rollup.num_supervised_tokens is 'loss denominator, tokens';
comment on column step_rollup.observed_at_s is 'end of the step, seconds since the epoch (UTC)';
comment on column step_rollup.num_llm_tokens is
'tokens through the LLM; null where its first stage reported nothing';
comment on column step_rollup.num_samples is
'samples of the global batch; null where the step plan is not in the store';

create table stage_rollup (
    run_id varchar not null,
    policy varchar not null,
    module varchar not null,
    stage bigint not null,
    dp_rank bigint not null,
    num_steps bigint not null,
    step_s double not null,
    busy_s double not null,
    data_wait_s double not null,
    schedule_wait_s double not null,
    reduce_s double not null,
    optimizer_s double not null
);

comment on table stage_rollup is
'Where the time of each stage went. Grain: one row per run_id, policy, module, stage, dp_rank. See v_stage_idle.';
comment on column stage_rollup.run_id is 'run; <run_id>/compare for comparison steps';
comment on column stage_rollup.policy is 'scheduling policy of the steps';
comment on column stage_rollup.module is 'module of the stage';
comment on column stage_rollup.stage is 'pipeline stage within the module';
comment on column stage_rollup.dp_rank is 'data parallel rank within the module';
comment on column stage_rollup.num_steps is 'different steps';
comment on column stage_rollup.step_s is 'time of all steps, seconds';
comment on column stage_rollup.busy_s is 'forward and backward, seconds';
comment on column stage_rollup.data_wait_s is 'wait for input before steps, seconds; no part of step_s';
comment on column stage_rollup.schedule_wait_s is 'wait for step plans while preparing input, seconds';
comment on column stage_rollup.reduce_s is 'gradient reduction, seconds';
comment on column stage_rollup.optimizer_s is 'optimizer update, seconds';

create table error_rollup (
    run_id varchar not null,
    policy varchar not null,
    module varchar not null,
    min_tokens bigint,
    num_spans bigint not null,
    predicted_s double not null,
    measured_s double not null,
    median_error_frac double not null,
    p95_error_frac double not null
);

comment on table error_rollup is
'Error of predicted seconds per microbatch and stage. Grain: run_id, policy, module, size. See v_prediction_error.';
comment on column error_rollup.run_id is 'run; <run_id>/compare for comparison steps';
comment on column error_rollup.policy is 'scheduling policy of the steps';
comment on column error_rollup.module is 'module of the stage';
comment on column error_rollup.min_tokens is
'microbatches of this many tokens up to twice as many (a power of two); null: all sizes together';
comment on column error_rollup.num_spans is 'microbatches that were timed, one per stage and rank';
comment on column error_rollup.predicted_s is 'predicted forward + backward, seconds';
comment on column error_rollup.measured_s is 'measured forward + backward compute, seconds';
comment on column error_rollup.median_error_frac is 'median of |predicted - measured| / measured, ratio';
comment on column error_rollup.p95_error_frac is '95th percentile of the same, ratio';

create table rank_rollup (
    run_id varchar not null,
    attempt bigint not null,
    rank bigint not null,
    module varchar not null,
    stage bigint not null,
    dp_rank bigint not null,
    num_steps bigint not null,
    peer_group varchar not null,
    num_peers bigint not null,
    predicted_s double not null,
    measured_s double not null,
    slowdown double not null
);

comment on table rank_rollup is
'How fast each process is beside its peers. Grain: one row per run_id, attempt, rank. See v_straggler.';
comment on column rank_rollup.run_id is 'run; <run_id>/compare for comparison steps';
comment on column rank_rollup.attempt is '0, then one more per restart of the training job';
comment on column rank_rollup.rank is 'global rank of the process';
comment on column rank_rollup.module is 'module the rank works for';
comment on column rank_rollup.stage is 'pipeline stage within the module';
comment on column rank_rollup.dp_rank is 'data parallel rank within the module';
comment on column rank_rollup.num_steps is 'steps in which the rank had work';
comment on column rank_rollup.peer_group is
'stage: the data-parallel ranks of its stage; module: the stages of its module, which has one data-parallel rank';
comment on column rank_rollup.num_peers is
'peers with work in a step, itself included, tensor-parallel groups counted once; 1: nothing to compare';
comment on column rank_rollup.predicted_s is 'predicted forward + backward, seconds';
comment on column rank_rollup.measured_s is 'measured forward + backward compute, seconds';
comment on column rank_rollup.slowdown is
'median over steps of measured per predicted second over the median of its peers, ratio; 1 is as fast as the others';

create table comparison_rollup (
    run_id varchar not null,
    first_step bigint not null,
    num_samples bigint not null,
    num_arrival_steps bigint not null,
    num_balanced_steps bigint not null,
    arrival_step_s double,
    balanced_step_s double,
    arrival_predicted_s double,
    balanced_predicted_s double,
    arrival_idle_frac double,
    balanced_idle_frac double
);

comment on table comparison_rollup is
'The same global batch under both policies. Grain: one row per run_id and global batch. See v_comparison.';
comment on column comparison_rollup.run_id is 'run, without /compare';
comment on column comparison_rollup.first_step is 'first comparison step of the batch; names it within the run';
comment on column comparison_rollup.num_samples is 'samples of the batch';
comment on column comparison_rollup.num_arrival_steps is 'repeats in arrival order';
comment on column comparison_rollup.num_balanced_steps is 'repeats balanced';
comment on column comparison_rollup.arrival_step_s is 'median measured step in arrival order, seconds';
comment on column comparison_rollup.balanced_step_s is 'median measured step balanced, seconds';
comment on column comparison_rollup.arrival_predicted_s is 'median predicted step in arrival order, seconds';
comment on column comparison_rollup.balanced_predicted_s is 'median predicted step balanced, seconds';
comment on column comparison_rollup.arrival_idle_frac is 'mean idle share in arrival order, ratio';
comment on column comparison_rollup.balanced_idle_frac is 'mean idle share balanced, ratio';

create table run_rollup (
    run_id varchar not null,
    num_steps bigint not null,
    num_ranks bigint not null,
    first_loss double,
    last_loss double,
    total_step_s double not null,
    median_step_s double not null,
    idle_frac double,
    llm_tokens_per_s double,
    samples_per_s double
);

comment on table run_rollup is 'Training steps of each run together. Grain: one row per run_id. See v_run_summary.';
comment on column run_rollup.run_id is 'run';
comment on column run_rollup.num_steps is 'different training steps';
comment on column run_rollup.num_ranks is 'ranks that reported';
comment on column run_rollup.first_loss is 'loss of the first step that has one';
comment on column run_rollup.last_loss is 'loss of the last step that has one';
comment on column run_rollup.total_step_s is 'time of all steps, seconds';
comment on column run_rollup.median_step_s is 'median step, seconds';
comment on column run_rollup.idle_frac is 'mean idle share of a step, ratio';
comment on column run_rollup.llm_tokens_per_s is 'median tokens through the LLM per second';
comment on column run_rollup.samples_per_s is 'median samples per second; null where step plans are not in the store';

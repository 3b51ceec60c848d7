-- Corrections by size of item, factors of ranks, the gate's evidence, and what was decided.

-- A new table, because DuckDB cannot alter a table and update its rows in one transaction.
create table correction_by_size (
    run_id varchar not null,
    effective_step bigint not null,
    module varchar not null,
    table_id varchar not null,
    factor double not null,
    residual_frac double not null,
    num_observations bigint not null,
    observed_at_s double not null,
    min_tokens bigint not null,
    max_tokens bigint not null,
    sd_frac double not null,
    is_in_force boolean not null,
    level double not null, -- noqa: RF04
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

insert into correction_by_size
select
    run_id,
    effective_step,
    module,
    table_id,
    factor,
    residual_frac,
    num_observations,
    observed_at_s,
    0 as min_tokens,
    9007199254740992 as max_tokens,
    0.0 as sd_frac,
    true as is_in_force,
    factor as level, -- noqa: RF04
    _run_id,
    _producer,
    _seq
from correction;

drop table correction;
alter table correction_by_size rename to correction;

comment on table correction is
'What multiplies predicted seconds of a module, by size of its items, learnt by a run; the buckets of a module are '
'written together. v_correction_in_force: what is applied.';
comment on column correction.run_id is 'run that learnt it';
comment on column correction.effective_step is 'first optimizer step planned with it';
comment on column correction.module is 'llm or the name of an encoder';
comment on column correction.table_id is 'cost table it corrects';
comment on column correction.factor is 'multiplies predicted seconds of items in the bucket, ratio';
comment on column correction.residual_frac is
'median absolute relative error of the uncorrected prediction in the window, ratio';
comment on column correction.num_observations is 'microbatches that the factor was learnt from';
comment on column correction.observed_at_s is 'when it was computed, seconds since the epoch (UTC)';
comment on column correction.min_tokens is 'tokens of the smallest item that the factor is for';
comment on column correction.max_tokens is 'first number of tokens that it is no longer for';
comment on column correction.sd_frac is 'standard deviation of the factor, in units of the prediction';
comment on column correction.is_in_force is 'whether plans are made with this factor; else with level, or with 1';
comment on column correction.level is 'factor of the module''s typical mix of items, ratio';
comment on column correction._run_id is 'run of the spool file the row came from';
comment on column correction._producer is 'producer of the spool file the row came from';
comment on column correction._seq is 'number of the spool file within its producer';

create table rank_factor (
    run_id varchar not null,
    attempt bigint not null,
    effective_step bigint not null,
    rank bigint not null,
    module varchar not null,
    stage bigint not null,
    dp_rank bigint not null,
    host varchar not null,
    factor double not null,
    sd_frac double not null,
    is_in_force boolean not null,
    observed_at_s double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table rank_factor is
'How much longer a rank takes for the same work than its peers, learnt by a run. v_slow_rank: the newest.';
comment on column rank_factor.run_id is 'run that learnt it';
comment on column rank_factor.attempt is '0, then one more per restart of the training job';
comment on column rank_factor.effective_step is 'first optimizer step planned with it';
comment on column rank_factor.rank is 'global rank of the process';
comment on column rank_factor.module is 'module whose grid the rank is in';
comment on column rank_factor.stage is 'pipeline stage within the grid';
comment on column rank_factor.dp_rank is 'data parallel rank within the grid';
comment on column rank_factor.host is 'machine the rank ran on';
comment on column rank_factor.factor is
'multiplies predicted seconds of everything the rank does, ratio; 1 is like its peers';
comment on column rank_factor.sd_frac is 'standard deviation of the factor, ratio';
comment on column rank_factor.is_in_force is 'whether plans are made with it';
comment on column rank_factor.observed_at_s is 'when it was computed, seconds since the epoch (UTC)';
comment on column rank_factor._run_id is 'run of the spool file the row came from';
comment on column rank_factor._producer is 'producer of the spool file the row came from';
comment on column rank_factor._seq is 'number of the spool file within its producer';

create table gate_reading (
    run_id varchar not null,
    attempt bigint not null,
    step bigint not null,
    is_on boolean not null,
    gain_frac double not null,
    mean_gain_frac double not null,
    stderr_frac double not null,
    cost_frac double not null,
    num_readings bigint not null,
    observed_at_s double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table gate_reading is
'Whether correcting by size pays, one reading per step: the evidence of the gate.';
comment on column gate_reading.run_id is 'run';
comment on column gate_reading.attempt is '0, then one more per restart of the training job';
comment on column gate_reading.step is 'optimizer step that was read';
comment on column gate_reading.is_on is
'whether plans are made with factors by size after this reading';
comment on column gate_reading.gain_frac is
'of this step: saved by a plan with factors from one half of the data, judged by the other half, ratio';
comment on column gate_reading.mean_gain_frac is 'exponential average of gain_frac';
comment on column gate_reading.stderr_frac is 'standard error of that average';
comment on column gate_reading.cost_frac is 'time that correcting takes, of a step, ratio';
comment on column gate_reading.num_readings is 'readings so far';
comment on column gate_reading.observed_at_s is 'when it was read, seconds since the epoch (UTC)';
comment on column gate_reading._run_id is 'run of the spool file the row came from';
comment on column gate_reading._producer is 'producer of the spool file the row came from';
comment on column gate_reading._seq is 'number of the spool file within its producer';

create table decision (
    run_id varchar not null,
    attempt bigint not null,
    step bigint not null,
    kind varchar not null,
    subject varchar not null,
    verdict varchar not null,
    measured double not null,
    expected double not null,
    gain_s double not null,
    cost_s double not null,
    num_steps_left bigint not null,
    plan_id varchar not null,
    new_plan_id varchar not null,
    detail varchar not null,
    observed_at_s double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table decision is
'What a run noticed about its own speed and what was done about it. v_history has it beside everything else.';
comment on column decision.run_id is 'run';
comment on column decision.attempt is 'start of the training job that it concerns';
comment on column decision.step is 'optimizer step at which it was noticed';
comment on column decision.kind is
'drift_cost, drift_shapes, slow_rank, gate, rescale, reprofile, replan or stage';
comment on column decision.subject is 'module with its sizes, rank, or plan';
comment on column decision.verdict is 'noticed, done, stay, advised or failed';
comment on column decision.measured is
'what was measured, in the units that detail names; NaN: nothing to measure';
comment on column decision.expected is 'what was expected, in the same units';
comment on column decision.gain_s is
'expected gain over the steps that are left, seconds; NaN: not reckoned';
comment on column decision.cost_s is 'what acting costs, seconds; NaN: not reckoned';
comment on column decision.num_steps_left is 'optimizer steps that were left';
comment on column decision.plan_id is 'plan that ran';
comment on column decision.new_plan_id is 'plan that runs from now on, or would; empty: none was looked for';
comment on column decision.detail is 'what was seen and decided, in words and figures';
comment on column decision.observed_at_s is 'when it was decided, seconds since the epoch (UTC)';
comment on column decision._run_id is 'run of the spool file the row came from';
comment on column decision._producer is 'producer of the spool file the row came from';
comment on column decision._seq is 'number of the spool file within its producer';

-- Comments of tables in plain words; definitions are unchanged.

comment on table sample_shape is
'What one sample costs every module, from headers and tokenizer alone. One row per sample of a data profile.';
comment on table quarantined_sample is 'A skipped sample, with the reason. No sample is skipped without such a row.';
comment on column quarantined_sample.phase is 'profile (found in the header) or train (found in decoding)';
comment on column quarantined_sample.reason is 'why it is skipped';
comment on table measurement is
'One timed probe: a few layers of a module on one packed group of samples. Cost tables are fitted to these rows.';
comment on column cost_table.source is 'measured or analytic (from a data sheet)';
comment on column cost_table.median_error_frac is 'median absolute relative error on held-out probes, ratio';
comment on column cost_table.p95_error_frac is
'95th percentile of the absolute relative error on held-out probes, ratio';
comment on column job_record.backend is 'launcher backend: local or slurm';
comment on column job_record.reason is 'reason for the state; empty when all is well';
comment on table plan is
'A layout of the model on the cluster with its predicted times; the next-best plans are kept, too. v_plan is readable.';
comment on column plan.candidate_rank is '0: the plan that runs; higher: the next-best plans in order';
comment on column plan.layout is
'split: dedicated ranks per module; inline: modules colocated, one pipeline holds the layers of all of them';
comment on column plan.modules is
'per module: degrees, first global rank, layers per stage (inline: 0 where a stage holds none), predicted peak bytes '
'per rank of each stage (inline: of all modules, in the row of the llm), whether layers are recomputed in backward '
'(recompute; recomputed: of each stage, how many of its first layers, empty: all), whether replicas shard the '
'optimizer state (shard_optimizer), replicas that shard parameters (parameter_shards, 1: none), per stage predicted '
'seconds to gather weights and to scatter gradients once (gather_s, scatter_s), tokens allowed in a microbatch of one '
'rank (max_tokens, 0: no cap)';
comment on column plan.baseline_step_s is 'mean simulated step of the same layout in arrival order, seconds';
comment on column plan.uniform_step_s is
'mean simulated step of the best plan with one layout for the whole model, in arrival order, seconds; NaN: none known';
comment on column plan.reason is 'why this plan has this rank';
comment on table plan_program is
'Bounds that a program proves for plans with dedicated ranks per module and one number of microbatches; proven for the '
'planning formula, not for simulated steps.';
comment on column step_plan.arrival_step_s is 'simulated step of the same batch in arrival order, seconds';
comment on table step_observation is 'Measurements of one optimizer step on one rank.';
comment on table run_input is
'What a job of a run read from the store; `dflop store rebuild --snapshot` restores it.';
comment on table run_event is 'A fault that a run recovered from; no rows: there was none.';
comment on column run_event.step is 'step of the event, from 0';
comment on table rank_span is 'One action of a rank in a traced step (train.trace_every_steps). See v_rank_time.';
comment on table rank_memory is
'Peak memory of a rank so far; a new row when it has grown. v_rank_memory has the latest.';
comment on table correction is
'Factors on predicted seconds of a module by length bucket, learned by a run; the buckets of a module are written '
'together. v_correction_in_force: the active ones.';
comment on column correction.run_id is 'run that learned it';
comment on column correction.num_observations is 'microbatches that the factor was learned from';
comment on column correction.min_tokens is 'tokens of the smallest item it applies to';
comment on column correction.max_tokens is 'tokens from which on it no longer applies';
comment on column correction.is_in_force is 'whether plans use this factor; otherwise level, or 1';
comment on column correction.level is 'overall factor of the module, ratio';
comment on table rank_factor is
'How much longer a rank takes than its peers for the same work, learned by a run. v_slow_rank: the newest.';
comment on column rank_factor.run_id is 'run that learned it';
comment on column rank_factor.factor is
'multiplies predicted seconds of all work of the rank, ratio; 1: as fast as its peers';
comment on column rank_factor.is_in_force is 'whether plans use it';
comment on table decision is
'A drift, a slow rank or a re-planning decision of a run, with what was done. v_history has all events.';
comment on column decision.step is 'optimizer step of the event, from 0';
comment on column decision.measured is 'measured value, in the units named in detail; NaN: none';
comment on column decision.expected is 'expected value, in the same units; NaN: none';
comment on column decision.gain_s is 'expected gain over the remaining steps, seconds; NaN: not estimated';
comment on column decision.cost_s is 'cost of acting, seconds; NaN: not estimated';
comment on column decision.new_plan_id is 'plan to run from now on, if adopted; empty: no search';
comment on column decision.detail is 'what was found and decided, in words and figures';
comment on table rank_rollup is
'Speed of each rank relative to its peers. Grain: one row per run_id, attempt, rank. See v_straggler.';
comment on table stage_rollup is
'Time of each stage by kind. Grain: one row per run_id, policy, module, stage, dp_rank. See v_stage_idle.';
comment on table span_rollup is
'Time of each rank by kind of work, in its traced steps. Grain: one row per run_id, rank and its place in the plan, '
'name. See v_rank_time.';
comment on column comparison_rollup.baseline is
'policy that balanced is compared with; arrival: arrival order, unbalanced';

-- Comparisons have several baselines. The table is computed anew, as the statement that computes it has changed.
drop table comparison_rollup;

create table comparison_rollup (
    run_id varchar not null,
    baseline varchar not null,
    first_step bigint not null,
    num_samples bigint not null,
    num_baseline_steps bigint not null,
    num_balanced_steps bigint not null,
    baseline_step_s double,
    balanced_step_s double,
    baseline_predicted_s double,
    balanced_predicted_s double,
    baseline_idle_frac double,
    balanced_idle_frac double
);

comment on table comparison_rollup is
'The same global batch under a baseline policy and balanced. Grain: one row per run_id, baseline and global batch. See '
'v_comparison.';
comment on column comparison_rollup.run_id is 'run, without /compare';
comment on column comparison_rollup.baseline is 'policy that balanced is compared with; arrival: data-blind';
comment on column comparison_rollup.first_step is 'first comparison step of the batch; names it within the run';
comment on column comparison_rollup.num_samples is 'samples of the batch';
comment on column comparison_rollup.num_baseline_steps is 'repeats under the baseline';
comment on column comparison_rollup.num_balanced_steps is 'repeats balanced';
comment on column comparison_rollup.baseline_step_s is 'median measured step under the baseline, seconds';
comment on column comparison_rollup.balanced_step_s is 'median measured step balanced, seconds';
comment on column comparison_rollup.baseline_predicted_s is 'median predicted step under the baseline, seconds';
comment on column comparison_rollup.balanced_predicted_s is 'median predicted step balanced, seconds';
comment on column comparison_rollup.baseline_idle_frac is 'mean idle share under the baseline, ratio';
comment on column comparison_rollup.balanced_idle_frac is 'mean idle share balanced, ratio';

-- A ratio of what is no positive number is null, here and in all that is computed of it.
create or replace macro positive(number) as -- noqa: RF04
case when number > 0 and number < 'inf'::double then number end;

create or replace view v_comparison as
select
    run_id,
    baseline,
    first_step,
    num_samples,
    num_baseline_steps,
    num_balanced_steps,
    baseline_step_s,
    balanced_step_s,
    positive(positive(baseline_step_s) / positive(balanced_step_s)) as measured_speedup,
    positive(positive(baseline_predicted_s) / positive(balanced_predicted_s)) as predicted_speedup,
    baseline_idle_frac,
    balanced_idle_frac
from comparison_rollup;

comment on macro positive is -- noqa: PRS
'The number where it is positive and finite, else null.';
comment on view v_comparison is
'The same global batch under a baseline and balanced, medians over repeats; v_speedup has the run''s own figure. '
'Grain: one row per run, baseline and global batch. Seconds.';
comment on column v_comparison.measured_speedup is
'measured step under the baseline over balanced, ratio; above 1: balanced was faster; null where either is missing';
comment on column v_comparison.predicted_speedup is
'simulated step under the baseline over balanced, ratio; null where either was not simulated';

-- A ratio of what is no positive number is null, here and in all that is computed of it.
create or replace macro positive(number) as -- noqa: RF04
case when number > 0 and number < 'inf'::double then number end;

create or replace view v_comparison as
select
    run_id,
    first_step,
    num_samples,
    num_arrival_steps,
    num_balanced_steps,
    arrival_step_s,
    balanced_step_s,
    positive(positive(arrival_step_s) / positive(balanced_step_s)) as measured_speedup,
    positive(positive(arrival_predicted_s) / positive(balanced_predicted_s)) as predicted_speedup,
    arrival_idle_frac,
    balanced_idle_frac
from comparison_rollup;

comment on macro positive is -- noqa: PRS
'The number where it is positive and finite, else null.';
comment on view v_comparison is
'The same global batch under both policies, medians over repeats; v_speedup has the run''s own figure. '
'Grain: one row per run and global batch. Seconds.';
comment on column v_comparison.measured_speedup is
'measured step in arrival order over balanced, ratio; above 1: balanced was faster; null where either is no time';
comment on column v_comparison.predicted_speedup is
'simulated step in arrival order over balanced, ratio; null where either was not simulated';

-- What a run gained is defined here: its report, its summary and the queries read this view. Batches differ more from
-- one another than policies do, so steps are paired by batch; the mean of ratios would favour the policy in the
-- denominator, so logarithms are averaged. The interval is Student's; dflop/records/speedup.py has the same.
create or replace macro student_95(num_degrees) as
case num_degrees
    when 2 then 4.302653
    when 3 then 3.182446
    else 1.959964 + 2.372271 / num_degrees + 2.822499 / num_degrees ** 2 + 2.555850 / num_degrees ** 3
end;

create or replace view v_speedup as
with batch as (
    select
        run_id,
        baseline,
        ln(measured_speedup) as measured,
        ln(predicted_speedup) as predicted
    from v_comparison
    where measured_speedup is not null
),

spread as (
    select
        run_id,
        baseline,
        count(*) as num_batches,
        avg(measured) as measured,
        avg(predicted) as predicted,
        count(predicted) = count(*) as is_predicted,
        case when count(*) >= 3 then student_95(count(*) - 1) / sqrt(count(*)) end as num_sds,
        num_sds * stddev_samp(measured) as measured_half,
        num_sds * stddev_samp(predicted) as predicted_half
    from batch
    group by run_id, baseline
)

select
    run_id,
    baseline,
    num_batches,
    exp(measured) as measured_speedup,
    exp(measured - measured_half) as measured_speedup_low,
    exp(measured + measured_half) as measured_speedup_high,
    case when is_predicted then exp(predicted) end as predicted_speedup,
    case when is_predicted then exp(predicted - predicted_half) end as predicted_speedup_low,
    case when is_predicted then exp(predicted + predicted_half) end as predicted_speedup_high
from spread;

comment on macro student_95 is -- noqa: PRS
'Two-sided 95 % quantile of Student''s t, within 0.3 %, from 2 degrees of freedom on.';
comment on view v_speedup is
'What balancing gained over a baseline, measured and simulated: geometric means over the global batches that ran under '
'both, with their 95 % intervals (none below three batches). Grain: one row per run that compared and baseline. Ratios.';
comment on column v_speedup.baseline is 'policy that balanced is compared with; arrival: arrival order, unbalanced';
comment on column v_speedup.num_batches is 'global batches with measured steps under both policies';
comment on column v_speedup.measured_speedup is
'measured step under the baseline over balanced, geometric mean over global batches, ratio; above 1: balanced was faster';
comment on column v_speedup.measured_speedup_low is
'lower end of the 95 % interval of measured_speedup, ratio; null below three batches';
comment on column v_speedup.measured_speedup_high is
'upper end of the 95 % interval of measured_speedup, ratio; null below three batches';
comment on column v_speedup.predicted_speedup is
'the same of the simulated steps of these batches, ratio; null where a batch was not simulated';
comment on column v_speedup.predicted_speedup_low is
'lower end of the 95 % interval of predicted_speedup, ratio; null below three batches';
comment on column v_speedup.predicted_speedup_high is
'upper end of the 95 % interval of predicted_speedup, ratio; null below three batches';

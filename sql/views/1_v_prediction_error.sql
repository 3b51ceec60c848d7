create or replace view v_prediction_error as
with span as (
    select
        run_id,
        policy,
        module,
        unnest(spans) as span
    from step_observation
),

timed as (
    select
        run_id,
        policy,
        module,
        span.predicted_forward_s + span.predicted_backward_s as predicted_s,
        span.forward_compute_s + span.backward_compute_s as measured_s
    from span
    where span.forward_compute_s + span.backward_compute_s > 0
)

select
    run_id,
    policy,
    module,
    count(*) as num_spans,
    median(abs(predicted_s - measured_s) / measured_s) as median_error_frac,
    quantile_cont(abs(predicted_s - measured_s) / measured_s, 0.95) as p95_error_frac,
    sum(predicted_s) / sum(measured_s) as predicted_to_measured
from timed
group by all;

comment on view v_prediction_error is
'Error of predicted forward + backward seconds per microbatch and stage. Grain: run_id, policy, module. Ratios.';

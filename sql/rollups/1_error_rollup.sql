-- Grouped twice in one pass: per size of microbatch, and over all sizes (min_tokens null).
with span as (
    select
        run_id,
        policy,
        module,
        unnest(spans) as span
    from step_observation
    where run_id in (select unnest($run_ids))
),

timed as (
    select
        run_id,
        policy,
        module,
        (2 ^ least(floor(log2(greatest(span.num_tokens, 1))), 61))::bigint as token_bucket,
        span.predicted_forward_s + span.predicted_backward_s as predicted_s,
        span.forward_compute_s + span.backward_compute_s as measured_s
    from span
    where span.forward_compute_s + span.backward_compute_s > 0
)

select
    run_id,
    policy,
    module,
    token_bucket as min_tokens,
    count(*) as num_spans,
    sum(predicted_s) as predicted_s,
    sum(measured_s) as measured_s,
    median(abs(predicted_s - measured_s) / measured_s) as median_error_frac,
    quantile_cont(abs(predicted_s - measured_s) / measured_s, 0.95) as p95_error_frac
from timed
group by grouping sets ((run_id, policy, module), (run_id, policy, module, token_bucket))

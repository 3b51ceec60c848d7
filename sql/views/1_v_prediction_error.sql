create or replace view v_prediction_error as
select
    run_id,
    policy,
    module,
    num_spans,
    median_error_frac,
    p95_error_frac,
    predicted_s / measured_s as predicted_to_measured
from error_rollup
where min_tokens is null;

comment on view v_prediction_error is
'Error of predicted forward + backward seconds per microbatch and stage. Grain: run_id, policy, module. Ratios.';
comment on column v_prediction_error.predicted_to_measured is
'total predicted over total measured seconds: the bias, ratio';

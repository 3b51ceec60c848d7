create or replace view v_prediction_error_by_size as
select
    run_id,
    policy,
    module,
    min_tokens,
    2 * min_tokens as below_tokens,
    num_spans,
    median_error_frac,
    p95_error_frac,
    predicted_s / measured_s as predicted_to_measured
from error_rollup
where min_tokens is not null;

comment on view v_prediction_error_by_size is
'v_prediction_error by tokens of the microbatch. Grain: run_id, policy, module, min_tokens. Tokens and ratios.';
comment on column v_prediction_error_by_size.min_tokens is
'microbatches of this many tokens (a power of two) and more';
comment on column v_prediction_error_by_size.below_tokens is 'and of fewer than this many';
comment on column v_prediction_error_by_size.predicted_to_measured is
'total predicted over total measured seconds: the bias, ratio';

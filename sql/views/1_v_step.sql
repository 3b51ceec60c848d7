-- idle_frac is everything but forward and backward compute, as a share of num_ranks * step_s. mfu_frac counts what the
-- model asks for, not what recomputation adds, and is null where the peak of the devices is not known.
create or replace view v_step as
select
    run_id,
    attempt,
    step,
    policy,
    num_ranks,
    step_s,
    predicted_step_s,
    busy_s as wall_s,
    compute_s,
    busy_s / nullif(compute_s, 0) as wall_to_compute,
    1 - busy_s / nullif(num_ranks * step_s, 0) as idle_frac,
    loss,
    grad_norm,
    num_supervised_tokens,
    utc(observed_at_s) as observed_at,
    num_samples,
    num_llm_tokens,
    num_llm_tokens / nullif(step_s, 0) as llm_tokens_per_s,
    model_flops,
    model_flops / nullif(step_s * peak_flops_per_s, 0) as mfu_frac
from step_rollup;

comment on view v_step is
'Optimizer steps; step_s is the slowest rank''s. Grain: one row per run_id, attempt, step, policy.';
comment on column v_step.wall_s is 'forward and backward over all ranks, wall seconds';
comment on column v_step.wall_to_compute is
'wall over compute seconds of forward and backward, ratio; on CPUs more than 1 where ranks waited for a core or a peer';
comment on column v_step.idle_frac is 'share of process time outside forward and backward, ratio';
comment on column v_step.llm_tokens_per_s is 'tokens through the LLM per second';
comment on column v_step.mfu_frac is
'model FLOPs over the peak of all devices, ratio; null where the peak is unknown';

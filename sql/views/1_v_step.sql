-- idle_frac is everything but forward and backward compute, as a share of num_ranks * step_s.
create or replace view v_step as
with llm_tokens as (
    -- Ranks of one tensor-parallel group see the same tokens: one of them (max) speaks for the group.
    select
        run_id,
        attempt,
        step,
        policy,
        dp_rank,
        max(coalesce(list_sum([span.num_tokens for span in spans]), 0)) as num_tokens
    from step_observation
    where module = 'llm' and stage = 0
    group by all
),

tokens as (
    select
        run_id,
        attempt,
        step,
        policy,
        sum(num_tokens)::bigint as num_llm_tokens
    from llm_tokens
    group by all
),

step as (
    select
        run_id,
        attempt,
        step,
        policy,
        count(*) as num_ranks,
        max(step_s) as step_s,
        max(predicted_step_s) as predicted_step_s,
        1 - sum(busy_s) / nullif(count(*) * max(step_s), 0) as idle_frac,
        max(loss) filter (where not isnan(loss)) as loss,
        max(grad_norm) filter (where not isnan(grad_norm)) as grad_norm,
        max(num_supervised_tokens) as num_supervised_tokens,
        max(observed_at_s) as observed_at_s
    from step_observation
    group by all
)

select
    step.*,
    tokens.num_llm_tokens,
    tokens.num_llm_tokens / nullif(step.step_s, 0) as llm_tokens_per_s
from step
left join tokens using (run_id, attempt, step, policy);

comment on view v_step is
'Optimizer steps; step_s is the slowest rank''s. Grain: one row per run_id, attempt, step, policy.';

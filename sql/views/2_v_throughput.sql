create or replace view v_throughput as
select
    run_id,
    attempt,
    step,
    policy,
    observed_at,
    step_s,
    num_samples / nullif(step_s, 0) as samples_per_s,
    llm_tokens_per_s,
    -- Steps whose tokens are unknown count neither as tokens nor as time.
    sum(num_llm_tokens) over recent
    / nullif(sum(step_s) filter (where num_llm_tokens is not null) over recent, 0) as recent_llm_tokens_per_s,
    idle_frac,
    mfu_frac
from v_step
window recent as (partition by run_id, attempt, policy order by step rows between 9 preceding and current row);

comment on view v_throughput is
'Speed over time; recent_: over the last 10 steps. Grain: one row per run_id, attempt, step, policy. Per second.';
comment on column v_throughput.samples_per_s is 'samples per second';
comment on column v_throughput.recent_llm_tokens_per_s is
'tokens through the LLM per second, over the last 10 steps';

-- Training steps only: comparison steps carry <run_id>/compare. A step repeated after a restart counts once, as its
-- last attempt. Policies that end at once are told apart by name: a tie must not be left to the order of rows.
with trained as (
    select *
    from step_rollup
    where run_id in (select unnest($run_ids)) and not contains(run_id, '/')
    qualify row_number() over (partition by run_id, step order by attempt desc, observed_at_s desc, policy desc) = 1
)

select
    run_id,
    count(*) as num_steps,
    max(num_ranks) as num_ranks,
    arg_min(loss, step) as first_loss,
    arg_max(loss, step) as last_loss,
    sum(step_s) as total_step_s,
    median(step_s) as median_step_s,
    avg(1 - busy_s / nullif(num_ranks * step_s, 0)) as idle_frac,
    median(num_llm_tokens / nullif(step_s, 0)) as llm_tokens_per_s,
    median(num_samples / nullif(step_s, 0)) as samples_per_s
from trained
group by run_id

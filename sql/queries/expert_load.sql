-- purpose: how evenly layers use their experts, and ranks that share them: planned with 1.2 times the mean
-- parameters: $run_id varchar, the run; $ep bigint, ranks that share the experts of a layer
-- grain: one row per layer of the llm, steps and ranks of the last attempt
-- units: tokens, once for every expert that they go to; ratios: most over mean
with last_attempt as (
    select *
    from expert_load
    where run_id = $run_id
    qualify attempt = max(attempt) over ()
),

sent as (
    select
        layer,
        len(num_tokens) as num_experts,
        unnest(num_tokens) as num_tokens,
        generate_subscripts(num_tokens, 1) - 1 as expert
    from last_attempt
),

of_expert as (
    select
        layer,
        num_experts,
        expert,
        sum(num_tokens) as num_tokens
    from sent
    group by all
),

of_rank as (
    select
        layer,
        expert * $ep // num_experts as ep_rank,
        sum(num_tokens) as num_tokens
    from of_expert
    group by all
),

ranks as (
    select
        layer,
        max(num_tokens) / nullif(avg(num_tokens), 0) as most_of_ranks
    from of_rank
    group by layer
)

select
    of_expert.layer,
    any_value(of_expert.num_experts) as num_experts,
    sum(of_expert.num_tokens)::bigint as num_tokens,
    arg_max(of_expert.expert, of_expert.num_tokens) as most_used_expert,
    max(of_expert.num_tokens) / nullif(avg(of_expert.num_tokens), 0) as most_of_experts,
    any_value(ranks.most_of_ranks) as most_of_ranks
from of_expert
inner join ranks on of_expert.layer = ranks.layer
group by of_expert.layer
order by of_expert.layer;

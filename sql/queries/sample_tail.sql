-- purpose: how heavy-tailed the work per sample of each module is (the potential of balancing)
-- parameters: none
-- grain: one row per data profile and module
-- units: tokens; tail_ratio = p99 / median
select
    profile_key,
    module,
    count(*) as num_samples,
    sum(num_items) as num_items,
    median(num_tokens) as median_tokens,
    quantile_cont(num_tokens, 0.99) as p99_tokens,
    max(num_tokens) as max_tokens,
    quantile_cont(num_tokens, 0.99) / nullif(median(num_tokens), 0) as tail_ratio
from v_sample_load
group by profile_key, module
order by profile_key, module;

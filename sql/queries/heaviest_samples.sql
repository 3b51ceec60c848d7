-- purpose: the samples with the most work for a module
-- parameters: $profile_key varchar, the data profile; $module varchar, llm or the name of an encoder
-- grain: one row per sample, the 20 heaviest
-- units: tokens; times_median is a ratio
select
    sample_index,
    sample_id,
    num_items,
    num_tokens,
    sum_sq_tokens,
    num_tokens / median(num_tokens) over () as times_median
from v_sample_load
where profile_key = $profile_key and module = $module
order by num_tokens desc, sample_index asc
limit 20;

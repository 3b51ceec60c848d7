create or replace view v_sample_load as
with item as (
    select
        profile_key,
        sample_index,
        sample_id,
        unnest(items) as media
    from v_sample_shape
)

select
    profile_key,
    sample_index,
    sample_id,
    media.module,
    count(*) as num_items,
    try_cast(sum(media.num_tokens) as bigint) as num_tokens,
    try_cast(sum(media.sum_sq_tokens) as bigint) as sum_sq_tokens
from item
group by all
union all by name
select
    profile_key,
    sample_index,
    sample_id,
    'llm' as module,
    num_supervised_tokens as num_items,
    num_llm_tokens as num_tokens,
    try_cast(num_llm_tokens::hugeint * num_llm_tokens as bigint) as sum_sq_tokens
from v_sample_shape;

comment on view v_sample_load is
'Work of each sample per module. Grain: one row per profile_key, sample_index, module that has work.';
comment on column v_sample_load.module is 'module that has work: an encoder or llm';
comment on column v_sample_load.num_items is 'media items of an encoder; tokens that carry loss for llm';
comment on column v_sample_load.num_tokens is 'tokens the module processes';
comment on column v_sample_load.sum_sq_tokens is 'sum of squared sequence lengths, tokens squared';

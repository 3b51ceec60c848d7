-- purpose: every sample of a data profile with its modality group and lengths, for plots and for other tools
-- parameters: $profile_key varchar, data profile
-- grain: one row per valid sample
-- units: tokens
with sample as (
    select
        *,
        list_distinct([item.kind for item in items]) as kinds
    from v_sample_shape
    where profile_key = $profile_key
)

select
    sample_index,
    sample_id,
    case
        when len(kinds) = 0 then 'text'
        when len(kinds) > 1 then 'mixed'
        when kinds[1] != 'image' then kinds[1]
        when len(items) = 1 then 'single_image'
        else 'multi_image'
    end as "group",
    num_text_tokens,
    num_supervised_tokens,
    num_llm_tokens,
    media_level,
    num_cut_tokens,
    weight
from sample
order by sample_index;

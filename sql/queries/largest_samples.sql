-- purpose: the largest samples by each quantity, which every plan must fit in memory
-- parameters: $profile_key varchar, the data profile
-- grain: one row per module and quantity
-- units: num: items (of the llm: supervised tokens), tokens, tokens squared, or tokens of one item
with shape as (
    select
        sample_index,
        sample_id,
        items
    from v_sample_shape
    where profile_key = $profile_key
),

item as (
    select
        sample_index,
        unnest(items) as media
    from shape
),

quantity as (
    unpivot (
        select
            module,
            sample_index,
            num_items,
            num_tokens,
            sum_sq_tokens
        from v_sample_load
        where profile_key = $profile_key
    )
    on num_items, num_tokens, sum_sq_tokens into name quantity value num
    union all by name
    select
        media.module,
        sample_index,
        'num_tokens_of_item' as quantity,
        media.num_tokens as num
    from item
),

-- Of equally large ones the first in the file.
largest as (
    select
        module,
        quantity,
        max(num) as num,
        max_by(sample_index, row(num, -sample_index)) as sample_index
    from quantity
    group by module, quantity
)

select
    largest.module,
    largest.quantity,
    largest.num,
    largest.sample_index,
    shape.sample_id
from largest
inner join shape on largest.sample_index = shape.sample_index
order by largest.module, largest.quantity;

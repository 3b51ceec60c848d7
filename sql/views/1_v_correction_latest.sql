-- The buckets of a set are written together but may come in two files: a set counts once it covers every size.
create or replace view v_correction_latest as
with once as (
    select *
    from correction
    qualify
        row_number() over (
            partition by table_id, module, run_id, effective_step, observed_at_s, min_tokens
            order by _producer desc, _seq desc, rowid desc
        ) = 1
),

sized as (
    select
        *,
        sum(max_tokens - min_tokens) over (partition by table_id, module, run_id, effective_step, observed_at_s)
            as num_sizes
    from once
)

select * exclude (num_sizes)
from sized
where num_sizes = 9007199254740992
qualify
    rank() over (partition by table_id, module order by observed_at_s desc, effective_step desc, run_id desc) = 1;

comment on view v_correction_latest is
'The newest whole set of corrections of every cost table, over all runs. Grain: table_id, module, min_tokens. Ratios.';

-- purpose: training loss of each entry of a mixture, over every so many steps
-- parameters: $run_id varchar, the run; $every bigint, steps that are taken together
-- grain: one row per source and first step of those that are taken together; of a step that ran twice the last attempt
-- units: nats per token, counts
with latest as (
    select *
    from source_loss
    where run_id = $run_id and split = 'train'
    qualify attempt = max(attempt) over (partition by step)
)

select
    source,
    step // $every * $every as first_step,
    sum(loss * num_tokens) / sum(num_tokens) as loss,
    sum(num_tokens)::bigint as num_tokens,
    sum(num_samples)::bigint as num_samples
from latest
group by all
order by source, first_step;

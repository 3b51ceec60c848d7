-- purpose: loss of the samples held out of training, after every so many steps, of all sources and of each
-- parameters: $run_id varchar, the run
-- grain: one row per validated step and source; source is null: all sources; of a step that ran twice the last attempt
-- units: nats per token; counts
with latest as (
    select *
    from source_loss
    where run_id = $run_id and split = 'validation'
    qualify attempt = max(attempt) over (partition by step)
)

select
    step,
    source,
    sum(loss * num_tokens) / sum(num_tokens) as loss,
    sum(num_tokens)::bigint as num_tokens,
    sum(num_samples)::bigint as num_samples
from latest
group by grouping sets ((step), (step, source))
order by step, source nulls first;

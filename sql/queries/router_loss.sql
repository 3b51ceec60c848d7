-- purpose: whether experts are used evenly: the load balancing loss of routers in training, over every so many steps
-- parameters: $run_id varchar, the run; $every bigint, steps that are taken together
-- grain: one row per first step of those that are taken together; of a step that ran twice the last attempt
-- units: mean over layers with experts, 1 where experts are used evenly, without its coefficient; counts
with latest as (
    select *
    from source_loss
    where run_id = $run_id and split = 'routers'
    qualify attempt = max(attempt) over (partition by step)
)

select
    step // $every * $every as first_step,
    avg(loss) as loss,
    max(loss) as largest,
    sum(num_tokens)::bigint as num_tokens
from latest
group by all
order by first_step;

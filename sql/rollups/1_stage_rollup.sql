select
    run_id,
    policy,
    module,
    stage,
    dp_rank,
    count(distinct step) as num_steps,
    sum(step_s) as step_s,
    sum(busy_s) as busy_s,
    sum(data_wait_s) as data_wait_s,
    sum(schedule_wait_s) as schedule_wait_s,
    sum(reduce_s) as reduce_s,
    sum(optimizer_s) as optimizer_s
from step_observation
where run_id in (select unnest($run_ids))
group by all

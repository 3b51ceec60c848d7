-- purpose: peak memory of every stage: predicted by the plan, and allocated by tensors of one of its ranks
-- parameters: $run_id varchar, the run
-- grain: one row per module and stage of the plan that ran last, ranks of the last attempt
-- units: bytes; a ratio; allocated: null without a GPU; process: host memory of a process, which plans do not predict
with newest as (
    select
        run_id,
        plan_id
    from v_run_plan
    where run_id = $run_id
    qualify number = max(number) over ()
),

place as (
    select unnest(plan.modules) as module_plan
    from plan
    inner join newest on plan.run_id = newest.run_id and plan.plan_id = newest.plan_id
),

predicted (module, stage, predicted_bytes) as (
    select
        module_plan.module,
        unnest(range(len(module_plan.stage_memory_bytes))),
        unnest(module_plan.stage_memory_bytes)
    from place
),

last_attempt as (
    select *
    from v_rank_memory
    where run_id = $run_id
    qualify attempt = max(attempt) over ()
),

measured as (
    select
        module,
        stage,
        max(peak_bytes) filter (where kind = 'allocated') as allocated_bytes,
        max(peak_bytes) filter (where kind = 'process') as process_bytes
    from last_attempt
    group by all
)

select
    predicted.module,
    predicted.stage,
    predicted.predicted_bytes,
    measured.allocated_bytes,
    measured.allocated_bytes / nullif(predicted.predicted_bytes, 0) as allocated_to_predicted,
    measured.process_bytes
from predicted
left join measured using (module, stage)
order by predicted.module, predicted.stage;

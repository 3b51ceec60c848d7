-- purpose: peak memory of every stage: what the plan predicted beside the most that one of its ranks measured
-- parameters: $run_id varchar, the run
-- grain: one row per module and stage of the plan that ran last
-- units: bytes of a process; a ratio; kind process: measured is all of the process, not only what plans predict
with newest as (
    select
        run_id,
        plan_id
    from v_run_plan
    where run_id = $run_id
    qualify row_number() over (order by number desc) = 1
),

newest_plan as (
    select plan.modules
    from newest
    inner join plan on newest.run_id = plan.run_id and newest.plan_id = plan.plan_id
),

place as (
    select unnest(modules) as module_plan
    from newest_plan
),

predicted (module, stage, predicted_bytes) as (
    select
        module_plan.module,
        unnest(range(len(module_plan.stage_memory_bytes))),
        unnest(module_plan.stage_memory_bytes)
    from place
),

measured as (
    select
        module,
        stage,
        max(struct_pack(attempt := attempt, peak_bytes := peak_bytes, kind := kind)) as last_one
    from v_rank_memory
    where run_id = $run_id
    group by all
)

select
    predicted.module,
    predicted.stage,
    predicted.predicted_bytes,
    measured.last_one.kind,
    measured.last_one.peak_bytes as measured_bytes,
    measured.last_one.peak_bytes / nullif(predicted.predicted_bytes, 0) as measured_to_predicted
from predicted
left join measured using (module, stage)
order by predicted.module, predicted.stage;

-- purpose: peak memory of every stage: what the plan predicted beside the most that one of its ranks measured
-- parameters: $run_id varchar, the run
-- grain: one row per module and stage of the plan that ran last
-- units: bytes of a process; a ratio; kind process: measured is all of the process, not only what plans predict
with newest_plan as (
    select plan.modules
    from v_run_plan as ran
    inner join plan on ran.run_id = plan.run_id and ran.plan_id = plan.plan_id
    where ran.run_id = $run_id
    qualify row_number() over (order by ran.number desc) = 1
),

place as (
    select unnest(modules) as module_plan
    from newest_plan
),

predicted as (
    select
        module_plan.module,
        unnest(range(len(module_plan.stage_memory_bytes))) as stage,
        unnest(module_plan.stage_memory_bytes) as predicted_bytes
    from place
),

measured as (
    select
        module,
        stage,
        max({ attempt: attempt, peak_bytes: peak_bytes, kind: kind }) as newest
    from v_rank_memory
    where run_id = $run_id
    group by all
)

select
    predicted.module,
    predicted.stage,
    predicted.predicted_bytes,
    measured.newest.kind as kind,
    measured.newest.peak_bytes as measured_bytes,
    measured.newest.peak_bytes / nullif(predicted.predicted_bytes, 0) as measured_to_predicted
from predicted
left join measured using (module, stage)
order by predicted.module, predicted.stage;

-- Every search that something came of leaves one row of rank 0. A plan has no time of its own: what its planner read,
-- which names the same snapshot, dates it; the decision for it, where there is one, says at which step.
create or replace view v_run_plan as
with searched as (
    select
        run_id,
        plan_id,
        snapshot_seq,
        max(num_microbatches) as num_microbatches,
        max(predicted_step_s) as predicted_step_s,
        max(baseline_step_s) as baseline_step_s,
        min(_seq) as first_seq
    from plan
    where candidate_rank = 0
    group by all
),

planner as (
    select
        run_id,
        snapshot_seq,
        utc(min(observed_at_s)) as observed_at
    from run_input
    where job = 'plan'
    group by all
),

numbered as (
    select
        searched.*,
        coalesce(planner.observed_at, run.started_at) as observed_at,
        row_number() over (
            partition by searched.run_id
            order by
                coalesce(planner.observed_at, run.started_at) nulls first, searched.first_seq, searched.plan_id
        ) as number -- noqa: RF04
    from searched
    left join planner on searched.run_id = planner.run_id and searched.snapshot_seq = planner.snapshot_seq
    left join v_run as run on searched.run_id = run.run_id
)

select
    numbered.run_id,
    numbered.number,
    numbered.plan_id,
    numbered.observed_at,
    arg_min(decision.step, abs(decision.observed_at_s - epoch(numbered.observed_at))) as step,
    plan.layout_text,
    numbered.num_microbatches,
    numbered.predicted_step_s,
    numbered.baseline_step_s,
    numbered.snapshot_seq
from numbered
inner join v_plan as plan on numbered.run_id = plan.run_id and numbered.plan_id = plan.plan_id
left join decision
    on
        numbered.run_id = decision.run_id
        and numbered.plan_id = decision.new_plan_id
        and numbered.number > 1
        and decision.verdict = 'done'
group by all;

comment on view v_run_plan is
'The plans of a run in order; step: of the decision, null for the first. '
'Grain: one row per run_id, number. Seconds.';
comment on column v_run_plan.run_id is 'run';
comment on column v_run_plan.number is 'place among the plans of the run, from 1';
comment on column v_run_plan.observed_at is 'when it was planned, UTC';
comment on column v_run_plan.step is 'optimizer step of the decision; null for the first';
comment on column v_run_plan.layout_text is 'layout in words';
comment on column v_run_plan.snapshot_seq is 'snapshot that it was planned from';

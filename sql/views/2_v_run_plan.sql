-- A plan has no time of its own. The first one is dated by what the planner read, later ones by the decision for them;
-- plans that a decision only looked at did not run and are left out.
create or replace view v_run_plan as
with decided as (
    select
        run_id,
        list(distinct new_plan_id) as new_plan_ids,
        arg_min(plan_id, observed_at_s) as first_plan_id
    from decision
    group by all
),

chosen as (
    select
        plan.run_id,
        plan.plan_id,
        coalesce(min(seen.observed_at_s), min(run.started_at_s)) as observed_at_s,
        null::bigint as step,
        null::bigint as attempt
    from v_plan as plan
    left join run_input as seen
        on plan.run_id = seen.run_id and seen.job = 'plan' and plan.snapshot_seq = seen.snapshot_seq
    left join v_run as run on plan.run_id = run.run_id
    left join decided on plan.run_id = decided.run_id
    where
        plan.candidate_rank = 0
        and (
            plan.plan_id = decided.first_plan_id
            or not list_contains(coalesce(decided.new_plan_ids, []), plan.plan_id)
        )
    group by all
    union all
    select
        run_id,
        new_plan_id as plan_id,
        observed_at_s,
        step,
        attempt
    from decision
    where verdict = 'done' and new_plan_id not in ('', plan_id)
)

select
    chosen.run_id,
    row_number() over (
        partition by chosen.run_id order by chosen.observed_at_s nulls first, plan.snapshot_seq, plan.plan_id
    ) as number, -- noqa: RF04
    plan.plan_id,
    chosen.observed_at_s,
    chosen.step,
    chosen.attempt,
    plan.layout_text,
    plan.num_microbatches,
    plan.predicted_step_s,
    plan.baseline_step_s,
    plan.snapshot_seq
from chosen
inner join v_plan as plan on chosen.run_id = plan.run_id and chosen.plan_id = plan.plan_id;

comment on view v_run_plan is
'The plans that a run ran under, one after the other; step: at which it was decided for, null for the first. '
'Grain: one row per run_id, number. Seconds.';

-- Training rows carry the run's own id; comparison rows carry <run_id>/compare and are no run of their own.
-- num_quarantined_samples counts samples of the data profile the run used, whoever made it, and what training found.
create or replace view v_run_summary as
with comparison as (
    select
        run_id,
        median(arrival_step_s) as arrival_step_s,
        median(balanced_step_s) as balanced_step_s,
        exp(avg(ln(measured_speedup))) as measured_speedup,
        exp(avg(ln(predicted_speedup))) as predicted_speedup,
        avg(arrival_idle_frac) as arrival_idle_frac,
        avg(balanced_idle_frac) as balanced_idle_frac
    from v_comparison
    group by all
),

uses as (
    select distinct
        run_id,
        data_profile_key as profile_key
    from run_input
    union
    select distinct
        run_id,
        profile_key
    from profile_record
    where kind = 'data'
),

quarantine as (
    select
        run_id,
        count(distinct sample_index) as num_quarantined_samples
    from (
        select
            uses.run_id,
            bad.sample_index
        from quarantined_sample as bad
        inner join uses using (profile_key)
        where bad.phase = 'profile'
        union all
        select
            split_part(_run_id, '/', 1) as run_id,
            sample_index
        from quarantined_sample
    ) as found
    group by all
),

corrections as (
    select
        run_id,
        count(distinct {
            table_id: table_id,
            module: module,
            effective_step: effective_step,
            observed_at_s: observed_at_s
        }) as num_corrections
    from correction
    group by all
),

events as (
    select
        split_part(run_id, '/', 1) as run_id,
        count(*) as num_events
    from run_event
    group by all
)

select
    run.run_id,
    run.state,
    plan.layout_text as plan_layout,
    plan.num_microbatches,
    coalesce(training.num_steps, 0) as num_steps,
    training.first_loss,
    training.last_loss,
    training.median_step_s,
    comparison.arrival_step_s,
    comparison.balanced_step_s,
    comparison.measured_speedup,
    coalesce(comparison.predicted_speedup, plan.predicted_speedup) as predicted_speedup,
    plan.predicted_speedup_over_uniform,
    training.idle_frac,
    comparison.arrival_idle_frac,
    comparison.balanced_idle_frac,
    training.llm_tokens_per_s,
    coalesce(quarantine.num_quarantined_samples, 0) as num_quarantined_samples,
    coalesce(corrections.num_corrections, 0) as num_corrections,
    coalesce(events.num_events, 0) as num_events,
    run.name,
    run.started_at_s,
    run.observed_at_s - run.started_at_s as elapsed_s,
    run.run_dir
from v_run as run
left join v_run_plan as ran on run.run_id = ran.run_id
left join v_plan as plan on ran.run_id = plan.run_id and ran.plan_id = plan.plan_id
left join run_rollup as training on run.run_id = training.run_id
left join comparison on run.run_id = comparison.run_id
left join quarantine on run.run_id = quarantine.run_id
left join corrections on run.run_id = corrections.run_id
left join events on run.run_id = events.run_id
where not contains(run.run_id, '/')
qualify row_number() over (partition by run.run_id order by ran.number desc nulls last) = 1;

comment on view v_run_summary is
'What a person wants first. Grain: one row per run. Speedups: arrival over balanced, mean over global batches; '
'over_uniform: simulated, the plan against the best data-blind plan with one layout for all modules.';

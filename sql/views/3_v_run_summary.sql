-- Training rows carry the run's own id; comparison rows carry <run_id>/compare and are no run of their own.
-- num_quarantined_samples counts samples of the data profile the run used, whoever made it, and what training found.
create or replace view v_run_summary as
with compared as (
    select
        split_part(run_id, '/', 1) as run_id,
        policy,
        idle_frac
    from v_step
    where ends_with(run_id, '/compare') and policy in ('arrival', 'balanced')
    -- A comparison that was started again counts with its last attempt.
    qualify attempt = max(attempt) over (partition by v_step.run_id)
),

paired as (
    select
        run_id,
        exp(avg(ln(baseline_step_s))) as arrival_step_s,
        exp(avg(ln(balanced_step_s))) as balanced_step_s
    from v_comparison
    where baseline = 'arrival' and measured_speedup is not null
    group by run_id
),

comparison as (
    select
        run_id,
        avg(idle_frac) filter (where policy = 'arrival') as arrival_idle_frac,
        avg(idle_frac) filter (where policy = 'balanced') as balanced_idle_frac
    from compared
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

dataset as (
    select
        uses.run_id,
        arg_max(profile_record.num_rows, profile_record.created_at_s) as num_samples
    from uses
    inner join profile_record on uses.profile_key = profile_record.profile_key and profile_record.kind = 'data'
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
    paired.arrival_step_s,
    paired.balanced_step_s,
    speedup.measured_speedup,
    speedup.measured_speedup_low,
    speedup.measured_speedup_high,
    speedup.predicted_speedup,
    speedup.predicted_speedup_low,
    speedup.predicted_speedup_high,
    plan.planned_speedup,
    plan.planned_speedup_over_uniform,
    training.idle_frac,
    comparison.arrival_idle_frac,
    comparison.balanced_idle_frac,
    training.llm_tokens_per_s,
    coalesce(quarantine.num_quarantined_samples, 0) as num_quarantined_samples,
    coalesce(corrections.num_corrections, 0) as num_corrections,
    coalesce(events.num_events, 0) as num_events,
    run.name,
    run.started_at,
    (epoch_us(run.observed_at) - epoch_us(run.started_at)) / 1e6 as elapsed_s,
    run.run_dir,
    training.llm_tokens_per_s / plan.num_processes as llm_tokens_per_s_per_process,
    training.total_step_s * training.num_ranks / 3600 as process_hours,
    dataset.num_samples / nullif(training.samples_per_s, 0) * training.num_ranks / 3600 as epoch_process_hours
from v_run as run
left join v_run_plan as ran on run.run_id = ran.run_id
left join v_plan as plan on ran.run_id = plan.run_id and ran.plan_id = plan.plan_id
left join run_rollup as training on run.run_id = training.run_id
left join paired on run.run_id = paired.run_id
left join comparison on run.run_id = comparison.run_id
left join v_speedup as speedup on run.run_id = speedup.run_id and speedup.baseline = 'arrival'
left join quarantine on run.run_id = quarantine.run_id
left join dataset on run.run_id = dataset.run_id
left join corrections on run.run_id = corrections.run_id
left join events on run.run_id = events.run_id
where not contains(run.run_id, '/')
qualify row_number() over (partition by run.run_id order by ran.number desc nulls last) = 1;

comment on view v_run_summary is
'Key figures. Grain: one row per run. Speedups as in v_speedup, null where nothing was compared; those '
'of planning as in v_plan.';
comment on column v_run_summary.run_id is 'run';
comment on column v_run_summary.plan_layout is 'layout of the last plan, in words';
comment on column v_run_summary.arrival_step_s is
'compared steps in arrival order: geometric mean over global batches, seconds; over balanced_step_s: measured_speedup';
comment on column v_run_summary.balanced_step_s is
'compared steps balanced, of the same global batches: geometric mean, seconds';
comment on column v_run_summary.measured_speedup is
'speedup by balancing, as in v_speedup: measured in arrival order over balanced, geometric mean over global '
'batches';
comment on column v_run_summary.predicted_speedup is
'the same of the simulated steps of these batches, ratio; null where a batch was not simulated';
comment on column v_run_summary.idle_frac is
'training steps: mean share of process time outside forward and backward, ratio';
comment on column v_run_summary.arrival_idle_frac is 'compared steps in arrival order: mean idle share, ratio';
comment on column v_run_summary.balanced_idle_frac is 'compared steps balanced: mean idle share, ratio';
comment on column v_run_summary.llm_tokens_per_s is 'training steps: median tokens through the LLM per second';
comment on column v_run_summary.llm_tokens_per_s_per_process is
'the same per process of the last plan (tokens/s/GPU on GPUs)';
comment on column v_run_summary.process_hours is
'training steps times processes, hours: GPU-hours where each process has a GPU';
comment on column v_run_summary.epoch_process_hours is
'the same of as many samples as the data profile has, at the median speed, hours; null: no profile or no speed';
comment on column v_run_summary.num_quarantined_samples is
'samples of its data profile and of its training that were skipped';
comment on column v_run_summary.num_corrections is 'sets of corrections that it learned';
comment on column v_run_summary.num_events is 'faults that it recovered from, including its comparison';
comment on column v_run_summary.started_at is 'when its first state was seen, UTC';
comment on column v_run_summary.elapsed_s is 'from its first to its newest state, seconds';

-- noqa: disable=RF04
create or replace view v_history as
with happened as (
    select
        run_id,
        utc(observed_at_s) as observed_at,
        0 as place,
        null::bigint as step,
        null::bigint as attempt,
        'run' as kind,
        name as subject,
        state as verdict,
        null::double as gain_s,
        null::double as cost_s,
        format('dflop {} on {}', code_rev, hardware) as detail
    from run_record
    union all by name
    select distinct -- a crash may have spooled a line of the job journal twice
        run_id,
        utc(observed_at_s) as observed_at,
        1 as place,
        attempt,
        'job' as kind,
        'train' as subject,
        state as verdict,
        concat_ws(', ', format('{} {}', backend, job_id), format('{} processes', num_tasks), nullif(reason, ''))
            as detail
    from job_record
    where job_name in ('train', concat(run_id, '-train'))
    union all by name
    select
        run_id,
        utc(observed_at_s) as observed_at,
        2 as place,
        step,
        attempt,
        kind,
        job as subject,
        'survived' as verdict,
        detail
    from run_event
    union all by name
    select
        run_id,
        observed_at,
        3 as place,
        effective_step as step,
        'correction' as kind,
        module as subject,
        'done' as verdict,
        concat_ws(
            '; ',
            format('overall factor {:.3f}', level),
            case when num_buckets > 1 then format(
                'largest bucket deviation {:.3f} +- {:.3f} at {} tokens{}; {} of {} length buckets active',
                worst.factor,
                worst.sd_frac,
                case
                    when worst.max_tokens >= 9007199254740992 then format('from {}', worst.min_tokens)
                    else concat(worst.min_tokens, ' to ', worst.max_tokens::hugeint - 1)
                end,
                case when worst.is_in_force then '' else ' (inactive, within noise)' end,
                num_in_force,
                num_buckets
            ) end
        ) as detail
    from v_correction_set
    where is_change
    union all by name
    select
        run_id,
        observed_at,
        4 as place,
        step,
        attempt,
        kind,
        subject,
        verdict,
        gain_s,
        cost_s,
        detail
    from v_decision
    union all by name
    select
        run_id,
        observed_at,
        5 as place,
        step,
        'plan' as kind,
        plan_id as subject,
        'chosen' as verdict,
        format(
            '{}, {} microbatches: {:.3g} s a step predicted, {:.3g} s in arrival order',
            layout_text, num_microbatches, predicted_step_s, baseline_step_s
        ) as detail
    from v_run_plan
)

select
    run_id,
    row_number() over (
        partition by run_id order by observed_at, place, step nulls first, kind, subject, detail
    ) as number,
    observed_at,
    (epoch_us(observed_at) - min(epoch_us(observed_at)) over (partition by run_id)) / 1e6 as elapsed_s,
    step,
    attempt,
    kind,
    subject,
    verdict,
    gain_s,
    cost_s,
    detail
from happened;

comment on view v_history is
'The event log of a run, in order: states of run and training job, plans, corrections that '
'change plans, events, decisions. Grain: one row per run_id, number. Seconds; steps count from 0.';
comment on column v_history.run_id is 'run; <run_id>/compare for its comparison';
comment on column v_history.number is 'position in the event log, from 1';
comment on column v_history.observed_at is 'when it happened, UTC';
comment on column v_history.elapsed_s is 'time since the run began, seconds';
comment on column v_history.step is 'optimizer step of the event, from 0; null: none';
comment on column v_history.attempt is 'attempt of the training job; null: none';
comment on column v_history.kind is 'run, job, plan, correction, or the kind of an event or a decision';
comment on column v_history.subject is 'what it is about: name of the run, job, module with its sizes, rank, or plan';
comment on column v_history.verdict is
'state of a run or job; chosen for a plan, survived for an event; noticed, done, stay, advised or failed';
comment on column v_history.gain_s is 'expected gain over the remaining steps, seconds; null: not estimated';
comment on column v_history.cost_s is 'cost of acting, seconds; null: not estimated';
comment on column v_history.detail is 'what happened, in words and figures';

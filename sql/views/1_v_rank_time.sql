-- What happens within a step adds up to it: `other` is the loop's and the engine's own time between the spans.
-- Waits for input come before a step, checkpoints after it; a wait for the plan is a thread's, one step ahead.
create or replace view v_rank_time as
with span as (
    select
        *,
        name in ('forward', 'backward', 'receive_wait', 'send', 'reduce', 'optimizer') as is_within
    from span_rollup
),

other as (
    select
        run_id,
        rank,
        module,
        stage,
        dp_rank,
        tp_rank,
        num_steps,
        step_s,
        any_value(step_s) - sum(duration_s) as duration_s
    from span
    where is_within
    group by all
)

select
    run_id,
    rank,
    module,
    stage,
    dp_rank,
    tp_rank,
    name,
    num_steps,
    num_spans,
    duration_s,
    duration_s / nullif(num_spans, 0) as mean_s,
    case when is_within then duration_s / nullif(step_s, 0) end as step_frac,
    num_bytes
from span
union all
select
    run_id,
    rank,
    module,
    stage,
    dp_rank,
    tp_rank,
    'other' as name, -- noqa: RF04
    num_steps,
    null as num_spans,
    duration_s,
    null as mean_s,
    duration_s / nullif(step_s, 0) as step_frac,
    0 as num_bytes
from other;

comment on view v_rank_time is
'Time of each rank by kind of work, over its traced steps. Grain: run_id, rank and its place in the plan, name. '
'Seconds, bytes; '
'step_frac: share of the steps, null outside them.';
comment on column v_rank_time.name is 'kind of work, see rank_span.name; other: not covered by spans';
comment on column v_rank_time.num_spans is 'how often it did that in them; null for other';
comment on column v_rank_time.mean_s is 'mean of once, seconds; null for other';
comment on column v_rank_time.step_frac is 'share of the traced steps, ratio; null outside steps';

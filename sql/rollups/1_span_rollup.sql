-- Checkpoints are written in every step, traced or not: they count in their own sums and make no step a traced one.
-- Spans without an observation belong to a step that did not end.
with observed as (
    select
        run_id,
        attempt,
        step,
        rank,
        max(step_s) as step_s
    from step_observation
    where run_id in (select unnest($run_ids))
    group by all
),

span as (
    select
        rank_span.*,
        observed.step_s
    from rank_span
    inner join observed using (run_id, attempt, step, rank)
),

traced_step as (
    select distinct
        run_id,
        rank,
        module,
        stage,
        dp_rank,
        tp_rank,
        attempt,
        step,
        step_s
    from span
    where name <> 'checkpoint'
),

traced as (
    select
        run_id,
        rank,
        module,
        stage,
        dp_rank,
        tp_rank,
        count(*) as num_steps,
        sum(step_s) as step_s
    from traced_step
    group by all
),

summed as (
    select
        run_id,
        rank,
        module,
        stage,
        dp_rank,
        tp_rank,
        name,
        count(*) as num_spans,
        sum(duration_s) as duration_s,
        sum(num_bytes) as num_bytes
    from span
    group by all
)

select
    summed.*,
    coalesce(traced.num_steps, 0) as num_steps,
    coalesce(traced.step_s, 0) as step_s
from summed
left join traced using (run_id, rank, module, stage, dp_rank, tp_rank)

with observation as (
    select
        * exclude (spans),
        coalesce(list_sum([s.forward_compute_s + s.backward_compute_s for s in spans]), 0) as compute_s
    from step_observation
    where run_id in (select unnest($run_ids))
),

samples as (
    select
        run_id,
        step,
        max(len(sample_index)) as num_samples,
        -- Every step has a plan, whoever made it; nonsense in one must not keep everybody's rows out of the store.
        max(try_cast(list_sum([w.item_rows for w in work if w.module = 'llm'][1]) as bigint)) as num_llm_tokens
    from step_plan
    where run_id in (select unnest($run_ids))
    group by all
),

flops as (
    select
        run_id,
        attempt,
        step,
        max(model_flops) filter (where not isnan(model_flops)) as model_flops,
        max(peak_flops_per_s) filter (where not isnan(peak_flops_per_s)) as peak_flops_per_s
    from step_flops
    where run_id in (select unnest($run_ids))
    group by all
),

step as (
    select
        run_id,
        attempt,
        step,
        policy,
        count(*) as num_ranks,
        max(step_s) as step_s,
        max(predicted_step_s) as predicted_step_s,
        sum(busy_s) as busy_s,
        sum(compute_s) as compute_s,
        -- Where all samples were lost there is no loss, whatever a rank wrote.
        max(loss) filter (where not isnan(loss) and num_supervised_tokens > 0) as loss,
        max(grad_norm) filter (where not isnan(grad_norm)) as grad_norm,
        max(num_supervised_tokens) as num_supervised_tokens,
        max(observed_at_s) as observed_at_s
    from observation
    group by all
)

select
    step.*,
    samples.num_llm_tokens,
    samples.num_samples,
    flops.model_flops,
    flops.peak_flops_per_s
from step
left join samples using (run_id, step)
left join flops using (run_id, attempt, step)

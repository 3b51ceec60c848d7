-- purpose: the slowest steps, with the error of their prediction and their longest sample
-- parameters: $run_id varchar, the run (or <run_id>/compare)
-- grain: one row per step, the 20 slowest
-- units: seconds, tokens (of the LLM, media included); idle_frac and predicted_to_measured are ratios
with slowest as (
    select *
    from v_step
    where run_id = $run_id
    order by step_s desc, step asc, attempt asc
    limit 20
),

drawn as (
    select distinct
        step,
        policy,
        unnest(sample_index) as sample_index
    from step_plan
    where run_id = $run_id and step in (select slowest.step from slowest)
),

wanted as (
    select split_part($run_id, '/compare', 1) as run_id
),

shape as (
    select distinct
        v_sample_shape.sample_index,
        v_sample_shape.sample_id,
        v_sample_shape.num_llm_tokens
    from wanted
    inner join v_run_input on wanted.run_id = v_run_input.run_id
    inner join v_sample_shape on v_run_input.data_profile_key = v_sample_shape.profile_key
),

-- Of equally long ones the first in the file.
longest as (
    select
        drawn.step,
        drawn.policy,
        max(shape.num_llm_tokens) as num_tokens,
        max_by(shape.sample_id, row(shape.num_llm_tokens, -shape.sample_index)) as sample_id
    from drawn
    inner join shape on drawn.sample_index = shape.sample_index
    group by drawn.step, drawn.policy
)

select
    slowest.step,
    slowest.attempt,
    slowest.policy,
    slowest.step_s,
    slowest.predicted_step_s,
    slowest.predicted_step_s / nullif(slowest.step_s, 0) as predicted_to_measured,
    slowest.idle_frac,
    slowest.num_llm_tokens,
    longest.num_tokens as longest_tokens,
    longest.sample_id as longest_sample
from slowest
left join longest on slowest.step = longest.step and slowest.policy = longest.policy
order by slowest.step_s desc, slowest.step asc, slowest.attempt asc;

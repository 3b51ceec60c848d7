-- purpose: whether a run slowed down (first against last quarter of its steps)
-- parameters: $run_id varchar, the run
-- grain: one row per quarter of the run
-- units: seconds, tokens per second; idle_frac is a ratio
with quarters as (
    select
        *,
        ntile(4) over (order by step, attempt) as part
    from v_step
    where run_id = $run_id
)

select
    part as quarter_of_run,
    min(step) as first_step,
    max(step) as last_step,
    median(step_s) as median_step_s,
    median(predicted_step_s) as median_predicted_step_s,
    median(llm_tokens_per_s) as llm_tokens_per_s,
    avg(idle_frac) as idle_frac
from quarters
group by part
order by part;

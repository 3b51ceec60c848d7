-- purpose: which module's gradient is large in which step, and how much of the model's that is
-- parameters: $run_id varchar, the run
-- grain: one row per step and module that trains; of a step that ran twice the last attempt
-- units: norms of the gradient before clipping; share of the squared norm, 0 to 1
with latest as (
    select *
    from grad_norm
    where run_id = $run_id
    qualify attempt = max(attempt) over (partition by step)
)

select
    step,
    module,
    grad_norm,
    grad_norm ** 2 / nullif(sum(grad_norm ** 2) over (partition by step), 0) as share_frac
from latest
order by step, module;

-- purpose: the current plan and the next-best ones, with reasons; then those of earlier searches of the run
-- parameters: $run_id varchar, the run
-- grain: one row per plan, those of the newest search first, best first
-- units: seconds, bytes; planned_speedup is baseline over predicted, ..._over_uniform is uniform over predicted
select
    candidate_rank,
    layout_text,
    num_microbatches,
    formula_step_s,
    predicted_step_s,
    baseline_step_s,
    planned_speedup,
    uniform_step_s,
    planned_speedup_over_uniform,
    sync_s,
    peak_memory_bytes,
    costs_text,
    reason
from v_plan
where run_id = $run_id
order by snapshot_seq desc, candidate_rank asc;

-- purpose: timeline of every rank in one traced step
-- parameters: $run_id varchar, the run (or <run_id>/compare); $step bigint, the step
-- grain: one row per span of the last attempt that traced the step
-- units: seconds from the start of the rank's step (negative before it), bytes
select
    rank,
    module,
    stage,
    dp_rank,
    tp_rank,
    name,
    microbatch,
    start_s,
    duration_s,
    num_bytes
from rank_span
where run_id = $run_id and step = $step
qualify attempt = max(attempt) over ()
order by rank, start_s, name;

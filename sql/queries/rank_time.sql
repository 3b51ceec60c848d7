-- purpose: where the time of every process went, and what it sent and received
-- parameters: $run_id varchar, the run (or <run_id>/compare)
-- grain: one row per rank and kind of work, over the traced steps
-- units: seconds, bytes; step_frac is a ratio of the step, null for what is before or after it
select *
from v_rank_time
where run_id = $run_id
order by rank asc, step_frac desc nulls last, name asc;

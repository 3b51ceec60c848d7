-- purpose: time of every rank by kind of work, and bytes sent and received
-- parameters: $run_id varchar, the run (or <run_id>/compare)
-- grain: one row per rank and kind of work, over the traced steps
-- units: seconds, bytes; step_frac is a ratio of the step, null for work before or after it
select *
from v_rank_time
where run_id = $run_id
order by rank asc, step_frac desc nulls last, name asc;

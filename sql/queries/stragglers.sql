-- purpose: processes that are slower than the others of their module on the same work
-- parameters: $run_id varchar, the run
-- grain: one row per process and attempt, slowest first
-- units: seconds; slowdown is a ratio to the median of the module (1.1: 10 % slower)
select
    rank,
    module,
    stage,
    dp_rank,
    attempt,
    num_steps,
    num_peers,
    measured_s,
    slowdown
from v_straggler
where run_id in ($run_id, $run_id || '/compare')
order by slowdown desc;

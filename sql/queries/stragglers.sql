-- purpose: ranks that are slower than their peers, per second of predicted work
-- parameters: $run_id varchar, the run (its comparison steps are included)
-- grain: one row per run_id, attempt and process that is more than 5 % slower over 3 steps or more, slowest first
-- units: seconds; slowdown is a ratio to the median of its peers (1.1: 10 % slower)
select
    run_id,
    rank,
    module,
    stage,
    dp_rank,
    attempt,
    num_steps,
    peer_group,
    num_peers,
    measured_s,
    slowdown
from v_straggler
where run_id in ($run_id, $run_id || '/compare')
order by slowdown desc, run_id asc, attempt asc, rank asc;

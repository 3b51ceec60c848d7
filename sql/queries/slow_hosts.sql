-- purpose: machines that were slow, over all runs
-- parameters: none
-- grain: one row per host that had a slow rank, those that were slow in most runs first
-- units: runs; ratios, 1: as fast as the peers
select
    host,
    count(distinct run_id) as num_runs,
    count(distinct run_id) filter (where is_slow) as num_slow_runs,
    median(factor) filter (where is_slow) as median_slow_factor,
    max(factor) filter (where is_slow) as worst_factor,
    max(observed_at) filter (where is_slow) as last_slow_at
from v_slow_rank
group by host
having bool_or(is_slow)
order by num_slow_runs desc, worst_factor desc, host asc;

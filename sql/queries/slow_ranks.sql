-- purpose: ranks of a run that take longer than their peers for the same work
-- parameters: $run_id varchar, the run
-- grain: one row per attempt and rank with its newest factor, newest attempt and slowest rank first
-- units: ratios; 1: as fast as its peers
select
    attempt,
    rank, -- noqa: RF04
    host,
    module,
    stage,
    dp_rank,
    factor,
    sd_frac,
    is_slow,
    is_in_force,
    effective_step,
    observed_at
from v_slow_rank
where run_id = $run_id
order by attempt desc, factor desc, rank asc;

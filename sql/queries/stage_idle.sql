-- purpose: time of each stage by kind, balanced and in arrival order
-- parameters: $run_id varchar, the run (its comparison steps are included)
-- grain: one row per policy, module, stage, data-parallel rank
-- units: ratios of the step time; busy_frac + idle_frac = 1
select *
from v_stage_idle
where run_id in ($run_id, $run_id || '/compare')
order by module, stage, dp_rank, run_id, policy;

-- purpose: process-hours (GPU-hours, where each process has a GPU) each run spent in steps, and what balancing saved
-- parameters: none
-- grain: one row per run with a comparison, newest first
-- units: hours of processes; saved_hours applies the speedup of v_speedup, and its 95 % interval, to the whole run
select
    run.run_id,
    run.num_steps,
    run_rollup.num_ranks,
    run_rollup.total_step_s * run_rollup.num_ranks / 3600 as process_hours,
    run.measured_speedup,
    run.measured_speedup_low,
    run.measured_speedup_high,
    process_hours * (run.measured_speedup - 1) as saved_hours,
    process_hours * (run.measured_speedup_low - 1) as saved_hours_low,
    process_hours * (run.measured_speedup_high - 1) as saved_hours_high
from v_run_summary as run
inner join run_rollup on run.run_id = run_rollup.run_id
where run.measured_speedup is not null
order by run.started_at desc;

-- purpose: process-hours (GPU-hours, if processes have GPUs) of each run and of an epoch, with price and savings
-- parameters: $usd_per_gpu_hour double, price of an hour of one process, 0 for no price
-- grain: one row per run with steps, newest first
-- units: hours of processes, US dollars; saved_hours: speedup of v_speedup, with its 95 % interval, on the whole run
select
    run_id,
    num_steps,
    plan_layout,
    process_hours,
    epoch_process_hours,
    nullif(process_hours * $usd_per_gpu_hour, 0) as usd,
    nullif(epoch_process_hours * $usd_per_gpu_hour, 0) as epoch_usd,
    measured_speedup,
    process_hours * (measured_speedup - 1) as saved_hours,
    process_hours * (measured_speedup_low - 1) as saved_hours_low,
    process_hours * (measured_speedup_high - 1) as saved_hours_high
from v_run_summary
where process_hours is not null
order by started_at desc;

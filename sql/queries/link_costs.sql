-- purpose: cost of messages between processes per type of hardware, with fit errors
-- parameters: none
-- grain: one row per model profile, operation, ranks, nodes, hardware, software
-- units: seconds, bytes per second; errors are ratios; seconds_per_64mib is one operation on a buffer of 64 MiB
select
    hardware,
    op,
    num_ranks,
    num_nodes,
    latency_s,
    bytes_per_s,
    latency_s + 67108864 / bytes_per_s as seconds_per_64mib,
    median_error_frac,
    num_measurements,
    source,
    software,
    profile_key
from v_link_cost_latest
order by hardware, profile_key, op, num_nodes, num_ranks;

-- A rank's seconds per predicted second, step by step, over the median of the ranks of its module at that step:
-- what a slow shape does to all of them cancels, what a slow device does to one of them stays.
with rank_step as (
    select
        run_id,
        attempt,
        step,
        policy,
        rank,
        module,
        stage,
        dp_rank,
        list_sum([s.predicted_forward_s + s.predicted_backward_s for s in spans]) as predicted_s,
        list_sum([s.forward_compute_s + s.backward_compute_s for s in spans]) as measured_s
    from step_observation
    where run_id in (select unnest($run_ids))
),

working as (
    select
        *,
        measured_s / predicted_s as pace
    from rank_step
    where predicted_s > 0 and measured_s > 0
),

peers as (
    select
        run_id,
        attempt,
        step,
        policy,
        module,
        median(pace) as peer_pace,
        count(*) as num_peers
    from working
    group by all
)

select
    working.run_id,
    working.attempt,
    working.rank,
    working.module,
    working.stage,
    working.dp_rank,
    count(*) as num_steps,
    max(peers.num_peers) as num_peers,
    sum(working.predicted_s) as predicted_s,
    sum(working.measured_s) as measured_s,
    median(working.pace / peers.peer_pace) as slowdown
from working
inner join peers using (run_id, attempt, step, policy, module)
group by all

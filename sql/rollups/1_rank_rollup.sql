-- A rank's seconds per predicted second, step by step, over the median of its peers at that step: what a slow shape
-- does to all of them cancels, what a slow device does to one of them stays. Peers are the other data-parallel ranks
-- of the stage, whose layers are the same: between stages the error of the prediction would pass for speed. Only where
-- a module has one data-parallel rank are its other stages the peers. Tensor-parallel ranks wait for each other in
-- every layer, so a group counts once and is no peer of its own.
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

scope as (
    select
        run_id,
        attempt,
        module,
        case when count(distinct dp_rank) > 1 then 'stage' else 'module' end as peer_group
    from working
    group by all
),

replica as (
    select
        working.run_id,
        working.attempt,
        working.step,
        working.policy,
        working.module,
        working.stage,
        working.dp_rank,
        scope.peer_group,
        case when scope.peer_group = 'stage' then working.stage else -1 end as peer_stage,
        median(working.pace) as pace
    from working
    inner join scope using (run_id, attempt, module)
    group by all
),

peers as (
    select
        * exclude (pace),
        median(pace) over others as peer_pace,
        count(*) over others + 1 as num_peers
    from replica
    window others as (
        partition by run_id, attempt, step, policy, module, peer_stage
        rows between unbounded preceding and unbounded following exclude current row
    )
)

select
    working.run_id,
    working.attempt,
    working.rank,
    working.module,
    working.stage,
    working.dp_rank,
    count(*) as num_steps,
    peers.peer_group,
    max(peers.num_peers) as num_peers,
    sum(working.predicted_s) as predicted_s,
    sum(working.measured_s) as measured_s,
    coalesce(median(working.pace / peers.peer_pace), 1) as slowdown
from working
inner join peers using (run_id, attempt, step, policy, module, stage, dp_rank)
group by all

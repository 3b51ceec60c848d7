-- purpose: why a run was slow: cores, prediction, slow ranks and hosts, input, idle time, slowdown, data, in one answer
-- parameters: $run_id varchar, the run (or <run_id>/compare)
-- grain: one row; no steps: none
-- units: seconds; ratios; data: LLM tokens of the slowest tenth of the steps over those of the median step
with step as (
    select
        *,
        step_s / nullif(predicted_step_s, 0) as measured_to_predicted,
        ntile(4) over (order by v_step.step, attempt) as part,
        percent_rank() over (order by step_s) as time_place
    from v_step
    where run_id = $run_id
),

whole as (
    select
        count(*) as num_steps,
        median(step_s) as step_s,
        median(measured_to_predicted) as measured_to_predicted,
        sum(wall_s) / nullif(sum(compute_s), 0) as wall_to_compute,
        avg(idle_frac) as idle_frac,
        median(step_s) filter (where part = 4) / median(step_s) filter (where part = 1) as slowdown,
        avg(num_llm_tokens) filter (where time_place >= 0.9) / nullif(median(num_llm_tokens), 0) as data_ratio
    from step
),

input as (
    select max(input_wait_frac) as input_wait_frac
    from v_stage_idle
    where run_id = $run_id
),

slow as (
    select
        max_by(rank, slowdown) as slow_rank,
        max(slowdown) as rank_slowdown
    from v_straggler
    where run_id = $run_id
),

host as (
    select max_by(host, attempt) as slow_host
    from v_slow_rank
    where run_id = $run_id and rank in (select slow.slow_rank from slow)
),

event as (
    select string_agg(kind || ' ' || num_events, ', ' order by kind) as events
    from (
        select
            kind,
            count(*) as num_events
        from run_event
        where run_id = $run_id
        group by kind
    ) as counted
),

figure as (
    select
        whole.*,
        input.input_wait_frac,
        slow.slow_rank,
        slow.rank_slowdown,
        host.slow_host,
        event.events
    from whole
    cross join input
    cross join slow
    cross join host
    cross join event
    where whole.num_steps > 0
),

cause as (
    select
        *,
        case when wall_to_compute > 1.3 then format(
            'forward and backward took {:.2f} times their compute time: other programs used the cores, '
            'or ranks waited for one another within them', wall_to_compute
        ) end as of_cores,
        case when rank_slowdown is not null then format(
            'rank {}{} takes {:.2f} times as long as its peers', slow_rank,
            coalesce(' on ' || nullif(slow_host, ''), ''), rank_slowdown
        ) end as of_ranks,
        case when input_wait_frac > 0.1 then format(
            'waits for input are {:.0f} % of the time', 100 * input_wait_frac
        ) end as of_input,
        case when idle_frac > 0.3 then format(
            'ranks are outside forward and backward for {:.0f} % of the time', 100 * idle_frac
        ) end as of_idle,
        case when slowdown > 1.2 then format(
            'the last quarter of the steps took {:.2f} times as long as the first', slowdown
        ) end as of_slowdown,
        case when data_ratio > 1.2 then format(
            'the slowest tenth of the steps has {:.2f} times the tokens of the median step', data_ratio
        ) end as of_data,
        'events: ' || events as of_events
    from figure
)

select
    concat(
        format('{} steps of {:.3g} s', num_steps, step_s),
        case when measured_to_predicted > 0 then format(', {:.2f} times as predicted', measured_to_predicted) end,
        ': ',
        coalesce(
            nullif(
                concat_ws('; ', of_cores, of_ranks, of_input, of_slowdown, of_idle, of_data, of_events), ''
            ),
            'no cause found among cores, ranks, hosts, input, idle time, slowdown, data and events'
        ),
        '.'
    ) as answer,
    step_s,
    measured_to_predicted,
    wall_to_compute,
    slow_rank,
    slow_host,
    rank_slowdown,
    input_wait_frac,
    idle_frac,
    slowdown,
    data_ratio
from cause;

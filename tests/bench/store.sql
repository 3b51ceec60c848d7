-- noqa: disable=RF02,RF04
insert into step_observation by name
select
    format('job{}-202611{:02d}-{:06d}', runs.r % 5, runs.r % 28 + 1, runs.r) as run_id,
    0 as attempt,
    steps.s as step,
    'balanced' as policy,
    ranks.k as rank,
    case when ranks.k < 2 then 'vision' else 'llm' end as module,
    case when ranks.k < 2 then 0 else (ranks.k - 2) // 3 end as stage,
    case when ranks.k < 2 then ranks.k else (ranks.k - 2) % 3 end as dp_rank,
    1.1 as predicted_step_s,
    1.0 + random() * 0.2 as step_s,
    0.7 + random() * 0.1 as busy_s,
    0.01 as data_wait_s,
    0.0 as schedule_wait_s,
    0.02 as reduce_s,
    0.01 as optimizer_s,
    8.0 - steps.s * 0.001 + random() * 0.1 as loss,
    1.0 as grad_norm,
    4000 as num_supervised_tokens,
    1.79e9 + runs.r * 3600 + steps.s * 1.2 as observed_at_s,
    [
        {
            microbatch: m,
            num_items: 3,
            num_tokens: (500 + 2000 * random())::bigint,
            sum_sq_tokens: 1000000,
            predicted_forward_s: 0.1,
            predicted_backward_s: 0.2,
            forward_start_s: 0.3 * m,
            forward_s: 0.1 + 0.02 * random(),
            backward_start_s: 1.0,
            backward_s: 0.2 + 0.02 * random(),
            forward_compute_s: 0.1 + 0.02 * random(),
            backward_compute_s: 0.2 + 0.02 * random()
        } for m in range(4)
    ] as spans,
    run_id as _run_id,
    'train' as _producer,
    steps.s // 100 as _seq
from range($num_runs) as runs (r), range($num_steps) as steps (s), range($num_ranks) as ranks (k);

insert into measurement by name
select
    'model' as profile_key,
    'llm' as module,
    'gpu' as hardware,
    'torch' as software,
    'bf16' as dtype,
    1 as tp,
    2 as num_layers,
    'random' as "group",
    1 as num_items,
    (random() * 1e6)::bigint as num_tokens,
    (random() * 1e12)::bigint as sum_sq_tokens,
    random() as forward_s,
    random() as backward_s,
    random() as forward_spread_s,
    random() as backward_spread_s,
    3 as num_repeats,
    1 as param_bytes,
    1 as activation_bytes,
    'run' as _run_id,
    'p' as _producer,
    range as _seq
from range(200000);

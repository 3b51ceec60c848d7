create or replace view v_rank_memory as
select
    run_id,
    attempt,
    rank, -- noqa: RF04
    module,
    stage,
    dp_rank,
    tp_rank,
    kind,
    max(step) as step,
    max(peak_bytes) as peak_bytes
from rank_memory
group by all;

comment on view v_rank_memory is
'Peak memory of each rank; kind allocated: tensors on its device, process: the process on the host. '
'Grain: one row per run_id, attempt, rank, kind. Bytes.';

-- Runs of one name are successive tries at the same job: what changed from one to the next, and what it was for.
create or replace view v_plan_history as
with planned as (
    select
        run.name,
        run.run_id,
        run.started_at_s,
        run.config_key,
        run.hardware,
        plan.layout_text,
        plan.num_microbatches,
        plan.global_batch_size,
        plan.predicted_step_s,
        plan.snapshot_seq,
        plan.reason,
        seen.data_profile_key,
        seen.model_profile_key,
        seen.table_ids
    from v_run as run
    inner join v_plan as plan on run.run_id = plan.run_id and plan.candidate_rank = 0
    left join v_run_input as seen on run.run_id = seen.run_id and seen.job = 'plan'
    qualify row_number() over (partition by run.run_id order by plan.snapshot_seq desc, seen.attempt desc) = 1
),

paired as (
    select
        planned,
        lag(planned) over (partition by planned.name order by planned.started_at_s, planned.run_id) as previous
    from planned
)

select
    planned.name,
    planned.run_id,
    planned.started_at_s,
    planned.layout_text,
    planned.num_microbatches,
    planned.predicted_step_s,
    previous.run_id as previous_run_id,
    previous.layout_text as previous_layout_text,
    previous.num_microbatches as previous_num_microbatches,
    previous.predicted_step_s as previous_predicted_step_s,
    case when previous is not null then concat_ws(
        ', ',
        case when planned.layout_text != previous.layout_text then 'layout' end,
        case when planned.num_microbatches != previous.num_microbatches then 'microbatches' end,
        case when planned.global_batch_size != previous.global_batch_size then 'global batch' end,
        case when planned.hardware != previous.hardware then 'hardware' end,
        case when planned.config_key != previous.config_key then 'configuration' end,
        case when planned.data_profile_key != previous.data_profile_key then 'data profile' end,
        case when planned.model_profile_key != previous.model_profile_key then 'model profile' end,
        case when planned.table_ids != previous.table_ids then 'cost tables' end
    ) end as changed,
    planned.snapshot_seq,
    planned.reason
from paired;

comment on view v_plan_history is
'The plan of each run beside that of the previous run of the same name. Grain: one row per run. Seconds.';

-- Runs of one name are successive tries at the same job: what changed from one to the next, and what it was for.
-- Corrections are those that were in force in the snapshot the plan was made from.
create or replace view v_plan_history as
with arrived as (
    select
        correction.table_id,
        correction.module,
        manifest.snapshot_seq,
        max({
            observed_at_s: correction.observed_at_s,
            effective_step: correction.effective_step,
            run_id: correction.run_id,
            producer: correction._producer,
            seq: correction._seq,
            row_number: correction.rowid,
            factor: correction.level
        }) as newest
    from correction
    inner join ingest_manifest as manifest
        on
            manifest.kind = 'correction'
            and correction._run_id = manifest.run_id
            and correction._producer = manifest.producer
            and correction._seq = manifest.seq
    where manifest.snapshot_seq is not null
    group by all
),

in_force as (
    select
        table_id,
        module,
        snapshot_seq,
        max(newest) over (partition by table_id, module order by snapshot_seq) as newest
    from arrived
),

planned as (
    select
        run.name,
        run.run_id,
        run.started_at,
        run.config_key,
        run.hardware,
        plan.plan_id,
        plan.layout_text,
        plan.num_microbatches,
        plan.global_batch_size,
        plan.predicted_step_s,
        plan.snapshot_seq,
        plan.reason,
        seen.data_profile_key,
        seen.model_profile_key,
        list_sort(coalesce(seen.table_ids, plan.table_ids)) as table_ids
    from v_run as run
    inner join v_run_plan as ran on run.run_id = ran.run_id
    inner join v_plan as plan on ran.run_id = plan.run_id and ran.plan_id = plan.plan_id
    left join v_run_input as seen on run.run_id = seen.run_id and seen.job = 'plan'
    qualify row_number() over (partition by run.run_id order by ran.number desc, seen.attempt desc) = 1
),

used as (
    select
        run_id,
        snapshot_seq,
        unnest(table_ids) as table_id
    from planned
),

factor as (
    select
        used.run_id,
        list({ table_id: used.table_id, factor: in_force.newest.factor } order by used.table_id) as factors,
        string_agg(format('{} {:.3f}', in_force.module, in_force.newest.factor), ', ' order by in_force.module)
            as corrections_text
    from used
    asof inner join in_force on used.table_id = in_force.table_id and used.snapshot_seq >= in_force.snapshot_seq
    group by all
),

corrected as (
    select
        planned.*,
        factor.factors,
        coalesce(factor.corrections_text, 'none') as corrections_text
    from planned
    left join factor using (run_id)
),

paired as (
    select
        corrected as planned,
        lag(corrected) over (partition by corrected.name order by corrected.started_at, corrected.run_id) as previous
    from corrected
)

select
    planned.name,
    planned.run_id,
    planned.started_at,
    planned.layout_text,
    planned.num_microbatches,
    planned.predicted_step_s,
    planned.corrections_text,
    previous.run_id as previous_run_id,
    previous.layout_text as previous_layout_text,
    previous.num_microbatches as previous_num_microbatches,
    previous.predicted_step_s as previous_predicted_step_s,
    previous.corrections_text as previous_corrections_text,
    previous.snapshot_seq as previous_snapshot_seq,
    case when previous is not null then concat_ws(
        ', ',
        case when planned.layout_text != previous.layout_text then 'layout' end,
        case when planned.num_microbatches != previous.num_microbatches then 'microbatches' end,
        case when planned.global_batch_size != previous.global_batch_size then 'global batch' end,
        case when planned.hardware != previous.hardware then 'hardware' end,
        case when planned.config_key != previous.config_key then 'configuration' end,
        case when planned.data_profile_key != previous.data_profile_key then 'data profile' end,
        case when planned.model_profile_key != previous.model_profile_key then 'model profile' end,
        case
            when planned.table_ids != previous.table_ids then 'cost tables'
            when planned.factors is distinct from previous.factors then 'corrections'
        end
    ) end as changed,
    planned.snapshot_seq,
    planned.reason
from paired;

comment on view v_plan_history is
'The last plan of each run, next to that of the previous run of the same name. Grain: one row per run. Seconds.';
comment on column v_plan_history.run_id is 'run';
comment on column v_plan_history.started_at is 'when the run began, UTC';
comment on column v_plan_history.layout_text is 'layout of the run''s last plan, in words';
comment on column v_plan_history.corrections_text is
'corrections active when it was made: module and factor';
comment on column v_plan_history.previous_run_id is 'previous run of the same name; null for the first';
comment on column v_plan_history.previous_layout_text is 'layout of the previous run''s plan';
comment on column v_plan_history.previous_num_microbatches is
'microbatches per global batch of the previous run''s plan';
comment on column v_plan_history.previous_predicted_step_s is 'simulated step of the previous run''s plan, seconds';
comment on column v_plan_history.previous_corrections_text is 'corrections of the previous run''s plan';
comment on column v_plan_history.previous_snapshot_seq is 'snapshot that the previous run''s plan was made from';
comment on column v_plan_history.changed is
'what differs from the previous run, in words; empty: nothing; null for the first';
comment on column v_plan_history.snapshot_seq is 'snapshot that the plan was made from';

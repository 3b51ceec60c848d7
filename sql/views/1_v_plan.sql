create or replace view v_plan as
with newest as (
    select *
    from plan
    qualify row_number() over (partition by run_id, plan_id order by _producer desc, _seq desc, rowid desc) = 1
),

place as (
    select
        plan_id,
        run_id,
        unnest(modules) as place,
        generate_subscripts(modules, 1) as nth
    from newest
),

-- Modules that begin at one rank share a grid, for which the last of them stands.
shown as (
    select
        plan_id,
        run_id,
        arg_max(place, nth) as place,
        string_agg(place.module, '+' order by nth) as title,
        count(*) over (partition by plan_id, run_id) as num_grids
    from place
    group by plan_id, run_id, place.first_rank
),

layout as (
    select
        plan_id,
        run_id,
        string_agg(
            format('{} tp{}', case when num_grids = 1 then 'colocated' else title end, place.parallel.tp)
            || case when place.parallel.cp > 1 then format(' cp{}', place.parallel.cp) else '' end
            || case when place.parallel.ep > 1 then format(' ep{}', place.parallel.ep) else '' end
            || format(' pp{} dp{}', place.parallel.pp, place.parallel.dp)
            || case
                when not place.recompute then ''
                when len(place.recompute_tokens) > 0
                    then format(
                        ' recompute up to {}/{}',
                        list_sum([len(limits) for limits in place.recompute_tokens]),
                        list_sum(place.layers_per_stage)
                    )
                when len(place.recomputed) = 0 then ' recompute'
                else format(' recompute {}/{}', list_sum(place.recomputed), list_sum(place.layers_per_stage))
            end
            || case
                when len(place.offloaded) = 0 then ''
                else format(' offload {}/{}', list_sum(place.offloaded), list_sum(place.layers_per_stage))
            end
            || case
                when place.parameter_shards = 1 then case when place.shard_optimizer then ' ZeRO-1' else '' end
                when place.parameter_shards < place.parallel.dp::hugeint * place.parallel.cp
                    then ' HSDP' || place.parameter_shards
                else ' FSDP2'
            end,
            ' | ' order by place.first_rank
        ) as layout_text,
        try_cast(
            sum(place.parallel.tp::double * place.parallel.pp * place.parallel.dp * place.parallel.cp) as bigint
        ) as num_processes,
        max(list_max(place.stage_memory_bytes)) as peak_memory_bytes
    from shown
    group by all
),

made_with as (
    select
        plan_id,
        run_id,
        unnest(table_ids) as table_id
    from newest
),

-- Tables of data sheets are of a software of their own, those derived of them, too.
known as (
    select distinct
        made_with.plan_id,
        made_with.run_id,
        format(
            '{} {}, {}: ±{:.0f} % {}',
            cost_table.module,
            cost_table.source,
            cost_table.hardware,
            100 * cost_table.median_error_frac,
            case
                when cost_table.software != 'analytic' then format('on {} probes', cost_table.num_measurements)
                when cost_table.num_measurements = 0 then 'with no published run'
                else format('against {} published runs', cost_table.num_measurements)
            end
        ) as costs_text
    from made_with
    inner join cost_table on made_with.table_id = cost_table.table_id
),

costs as (
    select
        plan_id,
        run_id,
        string_agg(costs_text, '; ' order by costs_text) as costs_text
    from known
    group by all
)

select
    plan.run_id,
    plan.candidate_rank,
    plan.plan_id,
    layout.layout_text,
    layout.num_processes,
    plan.num_microbatches,
    plan.global_batch_size,
    plan.formula_step_s,
    plan.predicted_step_s,
    plan.baseline_step_s,
    plan.baseline_step_s / nullif(plan.predicted_step_s, 0) as planned_speedup,
    nullif(plan.uniform_step_s, 'nan'::double) as uniform_step_s,
    nullif(plan.uniform_step_s, 'nan'::double) / nullif(plan.predicted_step_s, 0) as planned_speedup_over_uniform,
    plan.sync_s,
    layout.peak_memory_bytes,
    plan.snapshot_seq,
    plan.reason,
    plan.table_ids,
    costs.costs_text
from newest as plan
inner join layout using (plan_id, run_id)
left join costs using (plan_id, run_id);

comment on view v_plan is
'Plans of every run; uniform: best plan with one layout for all modules, in arrival order, null where none is '
'known; the newest of plans found twice. Grain: one row per run_id, plan_id; candidate_rank 0 runs, '
'v_run_plan has them in order. Seconds and bytes.';
comment on column v_plan.layout_text is 'degrees of every module in words, modules in the order of their ranks';
comment on column v_plan.costs_text is
'where its cost tables come from and their median error: on probes that the fit did not see, or of a data sheet '
'against published runs; null: not in the store';
comment on column v_plan.num_processes is 'processes of the plan';
comment on column v_plan.planned_speedup is
'simulated when planning: baseline_step_s over predicted_step_s, ratio; of means over batches, so without an '
'interval';
comment on column v_plan.uniform_step_s is
'mean simulated step of the best plan with one layout for the whole model, in arrival order, seconds; null: none known';
comment on column v_plan.planned_speedup_over_uniform is
'simulated when planning: uniform_step_s over predicted_step_s, ratio; without an interval; null: none known';
comment on column v_plan.peak_memory_bytes is 'predicted peak of the fullest stage of a process, bytes';

-- Plans say whether context-parallel ranks cut the frames of media.

-- A new table, because DuckDB cannot replay a change of a column's type after a crash.
create table plan_with_merged_tokens (
    plan_id varchar not null,
    run_id varchar not null,
    candidate_rank bigint not null,
    modules struct(
        module varchar,
        parallel struct(tp bigint, pp bigint, dp bigint, cp bigint, ep bigint),
        first_rank bigint,
        layers_per_stage bigint[],
        stage_memory_bytes bigint[],
        recompute boolean,
        shard_optimizer boolean,
        recomputed bigint[],
        offloaded bigint[],
        parameter_shards bigint,
        gather_s double[],
        scatter_s double[],
        max_tokens bigint,
        cost_growth double,
        recompute_tokens bigint[][],
        merge_tokens bigint
    )[] not null,
    num_microbatches bigint not null,
    global_batch_size bigint not null,
    formula_step_s double not null,
    predicted_step_s double not null,
    baseline_step_s double not null,
    sync_s double not null,
    uniform_step_s double not null,
    table_ids varchar[] not null,
    snapshot_seq bigint not null,
    reason varchar not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

insert into plan_with_merged_tokens
select
    plan_id,
    run_id,
    candidate_rank,
    [
        struct_pack(
            module := place.module,
            parallel := struct_pack(
                tp := place.parallel.tp,
                pp := place.parallel.pp,
                dp := place.parallel.dp,
                cp := place.parallel.cp,
                ep := place.parallel.ep
            ),
            first_rank := place.first_rank,
            layers_per_stage := place.layers_per_stage,
            stage_memory_bytes := place.stage_memory_bytes,
            recompute := place.recompute,
            shard_optimizer := place.shard_optimizer,
            recomputed := place.recomputed,
            offloaded := place.offloaded,
            parameter_shards := place.parameter_shards,
            gather_s := place.gather_s,
            scatter_s := place.scatter_s,
            max_tokens := place.max_tokens,
            cost_growth := place.cost_growth,
            recompute_tokens := place.recompute_tokens,
            merge_tokens := 0::bigint
        )
        for place in modules
    ] as modules,
    num_microbatches,
    global_batch_size,
    formula_step_s,
    predicted_step_s,
    baseline_step_s,
    sync_s,
    uniform_step_s,
    table_ids,
    snapshot_seq,
    reason,
    _run_id,
    _producer,
    _seq
from plan;

drop table plan;
alter table plan_with_merged_tokens rename to plan;

comment on table plan is
'A layout of the model on the cluster with its predicted times; the next-best plans are kept, too. v_plan is readable.';
comment on column plan.plan_id is 'identity of the plan';
comment on column plan.run_id is 'run it was made for';
comment on column plan.candidate_rank is '0: the plan that runs; higher: the next-best plans in order';
comment on column plan.modules is
'per module: degrees (ep: neighbouring replicas that share the experts of every layer), first global rank, layers '
'per stage (inline: 0 where a stage holds none), predicted peak bytes per rank of each stage (inline: of all '
'modules, in the row of the llm), whether layers are recomputed in backward (recompute; recomputed: of each stage, '
'how many of its first layers, empty: all; recompute_tokens: of each stage of the llm, ascending tokens of a '
'microbatch of one group of cp ranks, above each of which one more of its first layers is, empty: the same layers in '
'every microbatch), of each stage how many layers have their activations on the host (offloaded, empty: none), '
'whether replicas shard the optimizer state (shard_optimizer), replicas that shard parameters (parameter_shards, 1: '
'none), per stage predicted seconds to gather weights and to scatter gradients once (gather_s, scatter_s), tokens '
'allowed in a microbatch of one group of cp ranks (max_tokens, 0: no cap), by how much a token costs more for each '
'token before it in its sample (cost_growth), tokens that an encoder joins into one row, between which ranks cut '
'frames (merge_tokens, 0: frames stay whole)';
comment on column plan.num_microbatches is 'microbatches per global batch';
comment on column plan.global_batch_size is 'samples per optimizer step';
comment on column plan.formula_step_s is 'objective of the planning formula, seconds';
comment on column plan.predicted_step_s is 'mean simulated step with the scheduler that will run, seconds';
comment on column plan.baseline_step_s is 'mean simulated step of the same layout in arrival order, seconds';
comment on column plan.sync_s is
'part of every step time that is behind the pipeline: gradient synchronisation and optimizer, seconds';
comment on column plan.uniform_step_s is
'mean simulated step of the best plan with one layout for the whole model, in arrival order, seconds; NaN: none known';
comment on column plan.table_ids is 'cost tables it was computed from';
comment on column plan.snapshot_seq is 'store snapshot the inputs were read from';
comment on column plan.reason is 'why this plan has this rank';
comment on column plan._run_id is 'run of the spool file the row came from';
comment on column plan._producer is 'producer of the spool file the row came from';
comment on column plan._seq is 'number of the spool file within its producer';

-- Tokens that layers route to their experts.

create table expert_load (
    run_id varchar not null,
    attempt bigint not null,
    step bigint not null,
    rank bigint not null,
    stage bigint not null,
    dp_rank bigint not null,
    num_steps bigint not null,
    layer bigint not null,
    num_tokens bigint[] not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table expert_load is
'Tokens of a rank that one layer sent to each of its experts, summed over some steps. The named query expert_load has '
'shares.';
comment on column expert_load.run_id is 'run; <run_id>/compare for comparison steps';
comment on column expert_load.attempt is '0, then one more per restart of the training job';
comment on column expert_load.step is 'last optimizer step of those that are summed';
comment on column expert_load.rank is 'global rank';
comment on column expert_load.stage is 'pipeline stage within the grid';
comment on column expert_load.dp_rank is 'data parallel rank within the grid';
comment on column expert_load.num_steps is 'optimizer steps that are summed';
comment on column expert_load.layer is 'layer of the llm, from 0';
comment on column expert_load.num_tokens is
'tokens per expert, once for every expert that a token goes to; a rank without samples in a microbatch sends one token';
comment on column expert_load._run_id is 'run of the spool file the row came from';
comment on column expert_load._producer is 'producer of the spool file the row came from';
comment on column expert_load._seq is 'number of the spool file within its producer';

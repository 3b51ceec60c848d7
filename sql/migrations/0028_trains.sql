-- A cost table states what trains; of a frozen tower under a projector that trains it was to be guessed from its terms.

-- A new table, because DuckDB cannot fill a column and drop another in one transaction.
create table cost_table_with_trains (
    table_id varchar not null,
    profile_key varchar not null,
    module varchar not null,
    hardware varchar not null,
    software varchar not null,
    dtype varchar not null,
    tp bigint not null,
    source varchar not null,
    num_layers bigint not null,
    forward_s struct(
        layer_fixed double,
        layer_per_token double,
        layer_per_sq_token double,
        edge_fixed double,
        edge_per_token double,
        edge_per_item double,
        layer_knots double[],
        layer_bends double[]
    ) not null,
    backward_s struct(
        layer_fixed double,
        layer_per_token double,
        layer_per_sq_token double,
        edge_fixed double,
        edge_per_token double,
        edge_per_item double,
        layer_knots double[],
        layer_bends double[]
    ) not null,
    activation_bytes struct(
        layer_fixed double,
        layer_per_token double,
        layer_per_sq_token double,
        edge_fixed double,
        edge_per_token double,
        edge_per_item double,
        layer_knots double[],
        layer_bends double[]
    ) not null,
    layer_param_bytes bigint not null,
    edge_param_bytes bigint not null,
    num_measurements bigint not null,
    median_error_frac double not null,
    p95_error_frac double not null,
    trains varchar not null,
    recompute boolean not null,
    min_tokens bigint not null,
    max_tokens bigint not null,
    max_mean_length double not null,
    noise_frac double not null,
    optimizer_s_per_param double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null,
    fitted_at_s double default 0
);

insert into cost_table_with_trains
select
    table_id,
    profile_key,
    module,
    hardware,
    software,
    dtype,
    tp,
    source,
    num_layers,
    forward_s,
    backward_s,
    activation_bytes,
    layer_param_bytes,
    edge_param_bytes,
    num_measurements,
    median_error_frac,
    p95_error_frac,
    case
        when is_frozen then 'none'
        when
            backward_s.layer_fixed = 0 and backward_s.layer_per_token = 0 and backward_s.layer_per_sq_token = 0
            and len(backward_s.layer_knots) = 0
            then 'projector'
        else 'all'
    end as trains,
    recompute,
    min_tokens,
    max_tokens,
    max_mean_length,
    noise_frac,
    optimizer_s_per_param,
    _run_id,
    _producer,
    _seq,
    fitted_at_s
from cost_table;

drop table cost_table;
alter table cost_table_with_trains rename to cost_table;

comment on table cost_table is
'Fitted cost of one module at one tp on one kind of hardware: layers * layer terms + edge terms. See '
'v_cost_effective.';
comment on column cost_table.table_id is 'identity of the table';
comment on column cost_table.profile_key is 'model profile it was fitted to';
comment on column cost_table.module is 'llm or the name of an encoder';
comment on column cost_table.hardware is 'device it holds for';
comment on column cost_table.software is 'versions it holds for';
comment on column cost_table.dtype is 'number format of weights and activations';
comment on column cost_table.tp is 'tensor parallel degree, processes';
comment on column cost_table.source is 'measured or analytic (from a data sheet)';
comment on column cost_table.num_layers is 'layers of the module in the full model';
comment on column cost_table.forward_s is
'terms of the forward time: seconds, per token, per squared token, per item; slope falls by a bend at each knot';
comment on column cost_table.backward_s is
'terms of the backward time: seconds, per token, per squared token, per item; slope falls by a bend at each knot';
comment on column cost_table.activation_bytes is
'terms of the bytes autograd keeps: bytes, per token, per squared token, per item; slope falls by a bend at each '
'knot';
comment on column cost_table.layer_param_bytes is 'bytes of the parameters of one layer';
comment on column cost_table.edge_param_bytes is 'bytes of the parameters outside the layers';
comment on column cost_table.num_measurements is 'probes behind the fit';
comment on column cost_table.median_error_frac is 'median absolute relative error on held-out probes, ratio';
comment on column cost_table.p95_error_frac is
'95th percentile of the absolute relative error on held-out probes, ratio';
comment on column cost_table.trains is
'weights that take gradients: all, none, or of an encoder the projector, which is those outside its tower';
comment on column cost_table.recompute is 'whether layers run again in the backward pass';
comment on column cost_table.min_tokens is 'tokens of the smallest probe; 0: unknown';
comment on column cost_table.max_tokens is 'tokens of the largest probe; 0: unknown';
comment on column cost_table.max_mean_length is
'largest sum of squared lengths over tokens among the probes, tokens; 0: unknown';
comment on column cost_table.noise_frac is 'median spread of a probe over its repeats, ratio';
comment on column cost_table.optimizer_s_per_param is 'seconds of an optimizer step per parameter; 0: unknown';
comment on column cost_table._run_id is 'run of the spool file the row came from';
comment on column cost_table._producer is 'producer of the spool file the row came from';
comment on column cost_table._seq is 'number of the spool file within its producer';
comment on column cost_table.fitted_at_s is
'Unix time of the fit, seconds; 0 in rows from before it was recorded. v_cost_history has a time for all';

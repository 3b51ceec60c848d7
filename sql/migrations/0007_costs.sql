-- How a module was run, what did not fit, curves in tokens instead of lines, and the links between processes.

alter table measurement add column is_frozen boolean default false;
alter table measurement add column recompute boolean default false;
alter table measurement add column peak_bytes bigint default 0;
alter table measurement add column optimizer_s double default 0.0;
alter table measurement add column status varchar default 'ok';

comment on column measurement."group" is
'how the samples were drawn: random, length_sorted, tile_sorted, single or adaptive';
comment on column measurement.num_items is 'media items (encoders) or tokens that carry loss (llm)';
comment on column measurement.is_frozen is 'whether the weights took no gradients';
comment on column measurement.recompute is 'whether layers kept their inputs only and ran again in the backward pass';
comment on column measurement.peak_bytes is
'peak of device memory over forward and backward, weights and gradients included; 0: not counted';
comment on column measurement.optimizer_s is
'one optimizer step over the parameters of the probe, seconds; 0: not measured';
comment on column measurement.status is 'ok, or oom: did not fit, seconds are 0';

-- A new table, because DuckDB cannot replay a change of a column's type after a crash.
create table cost_table_with_curves (
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
    is_frozen boolean not null,
    recompute boolean not null,
    min_tokens bigint not null,
    max_tokens bigint not null,
    max_mean_length double not null,
    noise_frac double not null,
    optimizer_s_per_param double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

insert into cost_table_with_curves
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
    struct_insert(forward_s, layer_knots := cast([] as double[]), layer_bends := cast([] as double[])) as forward_s,
    struct_insert(backward_s, layer_knots := cast([] as double[]), layer_bends := cast([] as double[])) as backward_s,
    struct_insert(
        activation_bytes, layer_knots := cast([] as double[]), layer_bends := cast([] as double[])
    ) as activation_bytes,
    layer_param_bytes,
    edge_param_bytes,
    num_measurements,
    median_error_frac,
    p95_error_frac,
    false as is_frozen,
    false as recompute,
    0 as min_tokens,
    0 as max_tokens,
    0.0 as max_mean_length,
    0.0 as noise_frac,
    0.0 as optimizer_s_per_param,
    _run_id,
    _producer,
    _seq
from cost_table;

drop table cost_table;
alter table cost_table_with_curves rename to cost_table;

comment on table cost_table is
'Fitted cost of one module at one tp on one kind of hardware: layers * layer terms + edge terms. See v_cost_effective.';
comment on column cost_table.table_id is 'identity of the table';
comment on column cost_table.profile_key is 'model profile it was fitted to';
comment on column cost_table.module is 'llm or the name of an encoder';
comment on column cost_table.hardware is 'device it holds for';
comment on column cost_table.software is 'versions it holds for';
comment on column cost_table.dtype is 'number format of weights and activations';
comment on column cost_table.tp is 'tensor parallel degree, processes';
comment on column cost_table.source is 'measured or analytic';
comment on column cost_table.num_layers is 'layers of the module in the full model';
comment on column cost_table.layer_param_bytes is 'bytes of the parameters of one layer';
comment on column cost_table.edge_param_bytes is 'bytes of the parameters outside the layers';
comment on column cost_table.num_measurements is 'probes behind the fit';
comment on column cost_table._run_id is 'run of the spool file the row came from';
comment on column cost_table._producer is 'producer of the spool file the row came from';
comment on column cost_table._seq is 'number of the spool file within its producer';
comment on column cost_table.forward_s is
'terms of the forward time: seconds, per token, per squared token, per item; slope falls by a bend at each knot';
comment on column cost_table.backward_s is
'terms of the backward time: seconds, per token, per squared token, per item; slope falls by a bend at each knot';
comment on column cost_table.activation_bytes is
'terms of the bytes autograd keeps: bytes, per token, per squared token, per item; slope falls by a bend at each knot';
comment on column cost_table.median_error_frac is
'median absolute relative error on probes the fit did not see, ratio';
comment on column cost_table.p95_error_frac is
'95th percentile of the absolute relative error on probes the fit did not see, ratio';
comment on column cost_table.is_frozen is 'whether the weights take no gradients';
comment on column cost_table.recompute is 'whether layers run again in the backward pass';
comment on column cost_table.min_tokens is 'tokens of the smallest probe; 0: unknown';
comment on column cost_table.max_tokens is 'tokens of the largest probe; 0: unknown';
comment on column cost_table.max_mean_length is
'largest sum of squared lengths over tokens among the probes, tokens; 0: unknown';
comment on column cost_table.noise_frac is 'median spread of a probe over its repeats, ratio';
comment on column cost_table.optimizer_s_per_param is 'seconds of an optimizer step per parameter; 0: unknown';

create table link_measurement (
    profile_key varchar not null,
    hardware varchar not null,
    software varchar not null,
    op varchar not null,
    num_ranks bigint not null,
    num_nodes bigint not null,
    num_bytes bigint not null,
    seconds double not null,
    spread_s double not null,
    num_repeats bigint not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table link_measurement is 'One timed message or collective between processes.';
comment on column link_measurement.profile_key is 'model profile the measurement belongs to';
comment on column link_measurement.hardware is 'device the processes ran on';
comment on column link_measurement.software is 'versions that influence timings';
comment on column link_measurement.op is 'p2p, all_reduce or all_gather';
comment on column link_measurement.num_ranks is 'processes that took part';
comment on column link_measurement.num_nodes is 'nodes they ran on';
comment on column link_measurement.num_bytes is 'size of the buffer of one process, bytes';
comment on column link_measurement.seconds is 'median time, seconds';
comment on column link_measurement.spread_s is 'half the interquartile range, seconds';
comment on column link_measurement.num_repeats is 'timed repeats after warm-up';
comment on column link_measurement._run_id is 'run of the spool file the row came from';
comment on column link_measurement._producer is 'producer of the spool file the row came from';
comment on column link_measurement._seq is 'number of the spool file within its producer';

create table link_cost (
    profile_key varchar not null,
    hardware varchar not null,
    software varchar not null,
    op varchar not null,
    num_ranks bigint not null,
    num_nodes bigint not null,
    latency_s double not null,
    bytes_per_s double not null,
    source varchar not null,
    num_measurements bigint not null,
    median_error_frac double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table link_cost is
'Fitted cost of an operation between processes: latency_s + num_bytes / bytes_per_s.';
comment on column link_cost.profile_key is 'model profile it was fitted to';
comment on column link_cost.hardware is 'device it holds for';
comment on column link_cost.software is 'versions it holds for';
comment on column link_cost.op is 'p2p, all_reduce or all_gather';
comment on column link_cost.num_ranks is 'processes that take part';
comment on column link_cost.num_nodes is 'nodes they run on';
comment on column link_cost.latency_s is 'time of an empty message, seconds';
comment on column link_cost.bytes_per_s is 'rate at which a buffer moves, bytes per second';
comment on column link_cost.source is 'measured or analytic';
comment on column link_cost.num_measurements is 'measurements behind the fit';
comment on column link_cost.median_error_frac is 'median absolute relative error on the measurements, ratio';
comment on column link_cost._run_id is 'run of the spool file the row came from';
comment on column link_cost._producer is 'producer of the spool file the row came from';
comment on column link_cost._seq is 'number of the spool file within its producer';

-- What data and models cost: profiles, sample shapes, measurements, cost tables.
--
-- Columns are the fields of the records in dflop/records/, in order and with the same names; nested records are
-- structs, tuples are lists. _run_id, _producer and _seq name the spool file a row came from (join ingest_manifest).
-- Tables are append-only: what changes over time is a new row, and a view picks the latest.

create table profile_record (
    profile_key varchar not null,
    kind varchar not null,
    run_id varchar not null,
    inputs varchar not null,
    num_rows bigint not null,
    num_quarantined bigint not null,
    created_at_s double not null,
    elapsed_s double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table profile_record is
'A finished data or model profile; its presence means that every row under profile_key is in the spool.';
comment on column profile_record.profile_key is 'hash of everything the profile depends on';
comment on column profile_record.kind is 'data or model';
comment on column profile_record.run_id is 'run that computed the profile';
comment on column profile_record.inputs is 'JSON object of what the key was computed from, for people';
comment on column profile_record.num_rows is 'rows written: sample shapes (data) or measurements (model)';
comment on column profile_record.num_quarantined is 'samples that cannot be used';
comment on column profile_record.created_at_s is 'when it was finished, seconds since the epoch (UTC)';
comment on column profile_record.elapsed_s is 'how long it took, seconds';
comment on column profile_record._run_id is 'run of the spool file the row came from';
comment on column profile_record._producer is 'producer of the spool file the row came from';
comment on column profile_record._seq is 'number of the spool file within its producer';

create table sample_shape (
    profile_key varchar not null,
    sample_index bigint not null,
    sample_id varchar not null,
    num_text_tokens bigint not null,
    num_supervised_tokens bigint not null,
    num_llm_tokens bigint not null,
    items struct(
        kind varchar,
        path varchar,
        width_px bigint,
        height_px bigint,
        num_frames bigint,
        duration_s double,
        module varchar,
        grid bigint[],
        num_tokens bigint,
        sum_sq_tokens bigint,
        num_rows bigint
    )[] not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table sample_shape is
'What one sample will cost every module, from headers and tokenizer alone. One row per sample of a data profile.';
comment on column sample_shape.profile_key is 'data profile the row belongs to';
comment on column sample_shape.sample_index is 'row of the sample in the annotation file';
comment on column sample_shape.sample_id is 'id of the sample in the annotation file';
comment on column sample_shape.num_text_tokens is 'text tokens, special tokens included, media placeholders not';
comment on column sample_shape.num_supervised_tokens is 'tokens that carry loss';
comment on column sample_shape.num_llm_tokens is
'length of the sample''s sequence in the LLM: text tokens plus media rows';
comment on column sample_shape.items is
'media in order; px, seconds, grid (temporal, height, width) patches; num_rows: rows handed to the LLM';
comment on column sample_shape._run_id is 'run of the spool file the row came from';
comment on column sample_shape._producer is 'producer of the spool file the row came from';
comment on column sample_shape._seq is 'number of the spool file within its producer';

create table quarantined_sample (
    profile_key varchar not null,
    sample_index bigint not null,
    sample_id varchar not null,
    phase varchar not null,
    path varchar not null,
    reason varchar not null,
    run_id varchar not null,
    step bigint not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table quarantined_sample is
'A sample that cannot be trained on, and why. Nothing is dropped without such a row.';
comment on column quarantined_sample.profile_key is 'data profile the sample belongs to';
comment on column quarantined_sample.sample_index is 'row of the sample in the annotation file';
comment on column quarantined_sample.sample_id is 'id of the sample in the annotation file';
comment on column quarantined_sample.phase is 'profile (the header gave it away) or train (decoding did)';
comment on column quarantined_sample.path is 'file that is missing or damaged, relative to the media root';
comment on column quarantined_sample.reason is 'what is wrong';
comment on column quarantined_sample.run_id is 'training run that met it; empty in phase profile';
comment on column quarantined_sample.step is 'optimizer step that met it; -1 in phase profile';
comment on column quarantined_sample._run_id is 'run of the spool file the row came from';
comment on column quarantined_sample._producer is 'producer of the spool file the row came from';
comment on column quarantined_sample._seq is 'number of the spool file within its producer';

create table measurement (
    profile_key varchar not null,
    module varchar not null,
    hardware varchar not null,
    software varchar not null,
    dtype varchar not null,
    tp bigint not null,
    num_layers bigint not null,
    "group" varchar not null,
    num_items bigint not null,
    num_tokens bigint not null,
    sum_sq_tokens bigint not null,
    forward_s double not null,
    backward_s double not null,
    forward_spread_s double not null,
    backward_spread_s double not null,
    num_repeats bigint not null,
    param_bytes bigint not null,
    activation_bytes bigint not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table measurement is
'One timed probe: a module at a shallow depth on one packed group of samples. The facts cost tables are fitted to.';
comment on column measurement.profile_key is 'model profile the probe belongs to';
comment on column measurement.module is 'llm or the name of an encoder';
comment on column measurement.hardware is 'device the probe ran on';
comment on column measurement.software is 'versions that influence timings';
comment on column measurement.dtype is 'number format of weights and activations';
comment on column measurement.tp is 'tensor parallel degree, processes';
comment on column measurement.num_layers is 'layers of the probe, fewer than the full model has';
comment on column measurement."group" is 'how the samples were drawn: random, length_sorted, tile_sorted or single';
comment on column measurement.num_items is 'media items (encoders) or packed sequences (llm)';
comment on column measurement.num_tokens is 'positions the layers processed, tokens';
comment on column measurement.sum_sq_tokens is 'sum of squared sequence lengths, tokens squared';
comment on column measurement.forward_s is 'median forward time, seconds';
comment on column measurement.backward_s is 'median backward time, seconds';
comment on column measurement.forward_spread_s is 'half the interquartile range of the forward time, seconds';
comment on column measurement.backward_spread_s is 'half the interquartile range of the backward time, seconds';
comment on column measurement.num_repeats is 'timed repeats after warm-up';
comment on column measurement.param_bytes is 'bytes of the probe''s parameters';
comment on column measurement.activation_bytes is 'bytes autograd keeps between forward and backward';
comment on column measurement._run_id is 'run of the spool file the row came from';
comment on column measurement._producer is 'producer of the spool file the row came from';
comment on column measurement._seq is 'number of the spool file within its producer';

create table cost_table (
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
        edge_per_item double
    ) not null,
    backward_s struct(
        layer_fixed double,
        layer_per_token double,
        layer_per_sq_token double,
        edge_fixed double,
        edge_per_token double,
        edge_per_item double
    ) not null,
    activation_bytes struct(
        layer_fixed double,
        layer_per_token double,
        layer_per_sq_token double,
        edge_fixed double,
        edge_per_token double,
        edge_per_item double
    ) not null,
    layer_param_bytes bigint not null,
    edge_param_bytes bigint not null,
    num_measurements bigint not null,
    median_error_frac double not null,
    p95_error_frac double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

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
comment on column cost_table.forward_s is 'terms of the forward time: seconds, per token, per squared token, per item';
comment on column cost_table.backward_s is
'terms of the backward time: seconds, per token, per squared token, per item';
comment on column cost_table.activation_bytes is
'terms of the bytes autograd keeps: bytes, per token, per squared token, per item';
comment on column cost_table.layer_param_bytes is 'bytes of the parameters of one layer';
comment on column cost_table.edge_param_bytes is 'bytes of the parameters outside the layers';
comment on column cost_table.num_measurements is 'probes behind the fit';
comment on column cost_table.median_error_frac is 'median absolute relative error on the probes, ratio';
comment on column cost_table.p95_error_frac is '95th percentile of the absolute relative error on the probes, ratio';
comment on column cost_table._run_id is 'run of the spool file the row came from';
comment on column cost_table._producer is 'producer of the spool file the row came from';
comment on column cost_table._seq is 'number of the spool file within its producer';

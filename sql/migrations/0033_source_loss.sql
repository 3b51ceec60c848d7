-- Losses by source of the samples, of validations.

create table source_loss (
    run_id varchar not null,
    attempt bigint not null,
    step bigint not null,
    split varchar not null,
    source varchar not null,
    loss double not null,
    num_tokens bigint not null,
    num_samples bigint not null,
    observed_at_s double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table source_loss is
'Loss of samples of one source, over all ranks. The named query validation has the loss of all sources together.';
comment on column source_loss.run_id is 'run';
comment on column source_loss.attempt is '0, then one more per restart of the training job';
comment on column source_loss.step is 'optimizer step after which it was measured, from 0';
comment on column source_loss.split is 'validation: samples held out of training';
comment on column source_loss.source is 'entry of a mixture, or name of the annotation file';
comment on column source_loss.loss is 'nats per token, mean over tokens that carry loss';
comment on column source_loss.num_tokens is 'tokens that carry loss';
comment on column source_loss.num_samples is 'samples, those that could not be decoded left out';
comment on column source_loss.observed_at_s is 'Unix time, seconds';
comment on column source_loss._run_id is 'run of the spool file the row came from';
comment on column source_loss._producer is 'producer of the spool file the row came from';
comment on column source_loss._seq is 'number of the spool file within its producer';

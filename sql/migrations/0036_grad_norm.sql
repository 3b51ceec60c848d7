-- Gradient norms of modules.

create table grad_norm (
    run_id varchar not null,
    attempt bigint not null,
    step bigint not null,
    module varchar not null,
    grad_norm double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table grad_norm is
'Norm of the gradient of one module in one optimizer step, over all ranks, before clipping. step_observation has the '
'norm of the whole model.';
comment on column grad_norm.run_id is 'run';
comment on column grad_norm.attempt is '0, then one more per restart of the training job';
comment on column grad_norm.step is 'optimizer step, from 0';
comment on column grad_norm.module is 'vision, audio or llm; those that train';
comment on column grad_norm.grad_norm is 'L2 norm; NaN or infinite in a step that updated nothing';
comment on column grad_norm._run_id is 'run of the spool file the row came from';
comment on column grad_norm._producer is 'producer of the spool file the row came from';
comment on column grad_norm._seq is 'number of the spool file within its producer';

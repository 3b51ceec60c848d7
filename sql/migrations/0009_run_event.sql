-- What went otherwise than it should while a run trained: a late or dead scheduler, steps that ran a quick plan.

create table run_event (
    run_id varchar not null,
    job varchar not null,
    attempt bigint not null,
    step bigint not null,
    kind varchar not null,
    detail varchar not null,
    observed_at_s double not null,
    _run_id varchar not null,
    _producer varchar not null,
    _seq bigint not null
);

comment on table run_event is
'What a run did otherwise than planned and survived; a run without rows here had nothing to survive.';
comment on column run_event.run_id is 'run; <run_id>/compare for comparison steps';
comment on column run_event.job is 'train or compare';
comment on column run_event.attempt is '0, then one more per restart of the job';
comment on column run_event.step is 'step at which it was noticed';
comment on column run_event.kind is
'scheduler_late, scheduler_dead, scheduler_restarted, scheduler_given_up or scheduler_behind';
comment on column run_event.detail is 'what happened, in words and with figures';
comment on column run_event.observed_at_s is 'when it was noticed, seconds since the epoch (UTC)';
comment on column run_event._run_id is 'run of the spool file the row came from';
comment on column run_event._producer is 'producer of the spool file the row came from';
comment on column run_event._seq is 'number of the spool file within its producer';

-- Wall and compute time of forward and backward next to each other: on CPUs, programs that take the cores part them.

alter table step_rollup add column compute_s double;

comment on column step_rollup.compute_s is
'forward and backward over all ranks, compute seconds: processor time on CPUs, wall time on GPUs';
comment on column step_rollup.busy_s is 'forward and backward over all ranks, wall seconds';
comment on column stage_rollup.busy_s is 'forward and backward, wall seconds';
comment on column step_observation.busy_s is
'forward and backward, wall seconds; compute seconds (processor time on CPUs) are in spans, v_step has both';
comment on column run_event.kind is
'scheduler_late, scheduler_dead, scheduler_restarted, scheduler_given_up, scheduler_behind, memory_exceeded, '
'not_finite (a step whose loss or gradient norm is not finite: no update), checkpoint_failed, checkpoint_damaged, '
'machine_busy (forward and backward take more than 1.3 times their processor time: other programs use the cores)';

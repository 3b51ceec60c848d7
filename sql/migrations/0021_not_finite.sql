-- A kind of event that came after the table.

comment on column run_event.kind is
'scheduler_late, scheduler_dead, scheduler_restarted, scheduler_given_up, scheduler_behind, memory_exceeded, '
'not_finite (a step whose loss or gradient norm is not finite: no update), checkpoint_failed, checkpoint_damaged';

-- A kind of event that came after the table.

comment on column run_event.kind is
'scheduler_late, scheduler_dead, scheduler_restarted, scheduler_given_up, scheduler_behind, memory_exceeded, '
'not_finite (a step whose loss or gradient norm is not finite: no update), checkpoint_failed, checkpoint_damaged, '
'machine_busy (forward and backward take more than 1.3 times their processor time: other programs use the cores), '
'stopped_early (no lower validation loss: the remaining steps of the stage are skipped)';

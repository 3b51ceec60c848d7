-- Losses by source of training steps, too.

comment on table source_loss is
'Loss of samples of one source, over all ranks. The named queries validation and source_losses have sums of it.';
comment on column source_loss.split is
'validation: samples held out of training; train: those of the step, where the dataset has several sources';

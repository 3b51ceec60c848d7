-- The routers' load balancing loss of training steps, too.

comment on column source_loss.split is
'validation: samples held out of training; train: those of the step, where the dataset has several sources; '
'routers: the load balancing loss of layers with experts in the step';
comment on column source_loss.source is 'entry of a mixture, or name of the annotation file; of routers their module';
comment on column source_loss.loss is
'nats per token, mean over tokens that carry loss; of routers mean over layers, 1 where experts are used evenly';
comment on column source_loss.num_tokens is 'tokens that carry loss; of routers all tokens';

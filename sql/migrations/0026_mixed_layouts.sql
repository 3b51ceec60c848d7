-- Some encoders may be colocated with the LLM while others have dedicated ranks, and programs choose among all of it.

comment on column plan.layout is
'split: dedicated ranks per module; inline: modules colocated, one pipeline holds the layers of all of them; mixed: '
'some encoders are colocated with the llm';
comment on column plan_program.num_columns is
'grids near the best plan that fit in memory, of single modules and of the llm with others; of all modules the best';

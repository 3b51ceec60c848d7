-- What attention of language models with windows and chunks costs a sample.
alter table sample_shape add column sum_sq_llm_tokens bigint default 0;

comment on column sample_shape.sum_sq_llm_tokens is
'squared attention length in the language model, averaged over its layers; 0: the square of num_llm_tokens';

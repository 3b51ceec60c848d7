-- What a sample says, whatever its id and wherever it lies.
alter table sample_shape add column content_hash bigint default 0;

comment on column sample_shape.content_hash is
'hash of texts and media; equal ones teach the same; 0: unknown, as for tables of sizes and earlier profiles';

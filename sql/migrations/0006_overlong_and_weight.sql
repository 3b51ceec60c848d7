-- What was done to a sample that was longer than the context, and how often a mixture draws it.

alter table sample_shape add column media_level bigint default 0;
alter table sample_shape add column num_cut_tokens bigint default 0;
alter table sample_shape add column weight double default 1.0;

comment on column sample_shape.media_level is
'times the media limits of the family were halved to make the sample fit; 0: not at all';
comment on column sample_shape.num_cut_tokens is
'tokens cut off the end to make the sample fit; not part of the other counts';
comment on column sample_shape.weight is
'how often a mixture draws the sample, relative to the other samples of the profile';

-- By which recipe Linears of decoder layers multiply in FP8, of probes and of the tables that are fitted to them.

alter table measurement add column fp8 varchar default 'off';
alter table cost_table add column fp8 varchar default 'off';

comment on column measurement.fp8 is
'recipe by which Linears of decoder layers multiply in FP8; off: they multiply in dtype';
comment on column cost_table.fp8 is
'recipe by which Linears of decoder layers multiply in FP8; off: they multiply in dtype';

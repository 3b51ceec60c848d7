-- Whose run it is: several people share a store.

alter table run_record add column owner varchar default '';

comment on column run_record.owner is
'user@host that began the run; empty in rows from before owners were recorded';

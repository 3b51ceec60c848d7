-- purpose: how much history there is, and how fresh it is
-- parameters: none
-- grain: one row per kind of record, largest first
-- units: bytes of spool files; UTC
select
    kind,
    num_rows,
    num_files,
    num_bytes,
    num_runs,
    to_timestamp(last_ingested_at_s) as last_ingested_at
from v_store
order by num_rows desc, kind asc;

-- purpose: contents of the store: rows, freshness, rejected files
-- parameters: none
-- grain: one row per kind of record, largest first
-- units: bytes of spool files; UTC
select
    kind,
    num_rows,
    num_files,
    num_bytes,
    num_runs,
    last_ingested_at,
    num_refused_files,
    last_refused_at
from v_store
order by num_rows desc, kind asc;

"""The team's memory: every value of `dflop/records` as rows in DuckDB, written by many jobs, read by everyone.

Jobs write immutable Parquet files (`spool`), one ingester at a time turns them into rows of the live database
(`lease`, `live`, `migrate`, `ingest`) and publishes read-only copies (`snapshot`, `retention`); programs read those
through `reader`, people through `console`. Nothing is imported here: GPU nodes use `schema` and `spool` with pyarrow
alone, without DuckDB.

    <store>/store.json    where the live database is, how long snapshots stay
    <store>/spool/<kind>/<run_id>/<producer>-<seq>.parquet   immutable, written by every job
    <store>/archive/<kind>/<run_id>/<n>.parquet              the same rows, compacted; next_seq.json: numbers in use
    <store>/quarantine/<path below spool>.<sha256>           files that failed a check; *.reason.json says which
    <store>/ingest.lock                                      flock, taken before DuckDB sees the live file
    <store>/INGEST.lease/<epoch>.json                        claims; the highest number ingests (unsure locks)
    <store>/live/dflop.duckdb                                read-write, by the holder of lock and lease only
    <store>/snapshots/dflop-<seq>.duckdb, CURRENT            read-only copies (0444); CURRENT names the newest
    <store>/publishes/<seq>.parquet                          which files each snapshot was the first to hold
    <store>/current.duckdb                                   the newest snapshot, as a link for people
    <store>/cache/headers/                                   sizes of media files, for the next profile; may be deleted
    <store>/cache/models/                                    what was read and checked of models; may be deleted

Two limits. Publishing copies the whole database file and reads it once for its hash: seconds per gigabyte, so minutes
of staleness at a hundred gigabytes. On a mount whose locks do not reach across nodes, a holder that sleeps longer
than the lease *between its last check and its commit* can collide with its successor when both open one live database
on that mount; a live database on each node's own disk (`dflop store init --live`) removes even that. What was tried
in place of this design is in docs/tried.md. No test runs on a real NFS or Lustre mount: what such a mount adds
(attribute caches, ESTALE, missing locks) is injected.
"""

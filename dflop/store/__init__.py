"""The team's memory: every value of `records.py` as rows in DuckDB, written by many jobs, read by everyone.

Jobs write immutable Parquet files (`spool`), one ingester at a time turns them into rows of the live database
(`lock`, `live`, `migrate`, `ingest`) and publishes read-only copies (`snapshot`); programs read those through
`reader`, people through `console`. Nothing is imported here: GPU nodes use `schema` and `spool` with pyarrow alone,
without DuckDB.
"""

"""The run directory: its files, who drives it, how it stands, cancelling it.

A run has one driver: the only process that submits its jobs. A file lock and a numbered claim with a heartbeat
(`driver_lock.py`) say who, on which host, since when. The driver watches jobs and owns none: a run is found again by
the hash of its configuration or by name (`lifecycle.py`, `find.py`), finished profiles are found in the store by key,
live jobs are found by theirs and adopted. So the answer to most failures is to run the same command again.

`directory.py` has a name for every file; jobs find their inputs there and nowhere else. A run is trained by one job at
a time, whoever submitted it (`training_claim.py`), and opened by its owner alone (`find.py`). pyarrow is imported
because shapes are kept as Parquet.
"""

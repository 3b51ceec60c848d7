"""What is installed, reachable and healthy here, and what to do about the rest: `dflop doctor`.

`examine.py` has the order in which things are looked at; each file gives `Finding`s of one kind of thing, and
`partition_limits.py` what sinfo knows and `sbatch --test-only` does not say. packaging compares versions in
`installed.py`.
"""

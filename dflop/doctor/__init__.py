"""What is installed, reachable and healthy here, and what to do about the rest: `dflop doctor`.

`examine.py` has the order in which things are looked at; each file gives `Finding`s of one kind of thing,
`partition_limits.py` what sinfo knows and `sbatch --test-only` does not say, and `trial.py` what real jobs see on nodes
(`on_node.py`). packaging compares versions in `installed.py`.
"""

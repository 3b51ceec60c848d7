"""Durations and an order -> a timeline.

`kernel.py` is the simulator: compiled, one pass over a list of operations, for the judge of candidates, the search and
reports alike. Tests hold it equal to a graph of operations that is walked in Python (`tests/simulate/graph.py`). Where
processes share cores, the clock of what came out is stretched: n running operations on c cores progress at rate
min(1, c / n) (`on_shared_cores` in `step.py`).

The order itself is data (`order.py`): the engine runs the object that the simulator times, and memory, packing and
traces read from it what is in flight and what waits for what. Messages delay
what waits for them; ranks that share out parameters meet in every microbatch; gradient synchronisation and the
optimizer come behind the pipeline as `Plan.sync_s`. numba is imported in `jit.py` alone.
"""

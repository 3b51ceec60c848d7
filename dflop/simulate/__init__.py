"""Durations and the 1F1B order -> a timeline.

Four forms agree, and tests hold them equal: `simulate_reference` (`events.py`) walks time event by event and is the
only one that knows processes that share cores: n running operations on c cores progress at rate min(1, c / n).
`simulate` takes one pass over the operation graph of `step.py`. `kernel.py` is compiled and builds no graph.
`lanes.py`, for the search, knows linear steps only and runs all ranks of the LLM as lanes of one list.

The order itself is data (`pipeline_order.py`): the engine runs the object that the simulator times. Messages delay
what waits for them; gradient synchronisation and the optimizer come behind the pipeline as `Plan.sync_s`. numba is
imported in `jit.py` alone; without it the same functions run as plain Python, and what only pays when it is fast is
left out.
"""

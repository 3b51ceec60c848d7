"""Modules on this device -> `Measurement`s, within a budget of seconds.

`profiler.py` goes over modules and ways of running them, `groups.py` makes packed groups of real shapes, spread over
their sizes, `sweeps.py` chooses the next one, `probe.py` times it on the engine's own stage at two shallow depths,
`link_probe.py` times messages. `forecast.py` says which probes would run.

Shallow probes must not flatter a deep module: passes start with cold caches (`timing.py`), and jobs on CPUs put huge
pages under the heap (`dflop/steps/submit.py`).
"""

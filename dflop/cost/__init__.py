"""Measurements or a data sheet -> cost tables -> seconds and bytes of any microbatch of any module.

    Measurement --fit.py------> CostTable --+
    data sheet ---analytic.py-> CostTable --+--> CostModel (model.py) --> seconds, bytes

`roofline.py` says what a data sheet means, `tests/bench/published.py` holds it to published trainings, `published.py`
says how sure a plan is; `curve.py` what the terms of a table mean, `throughput.py` what a step time means to people.
`variants.py` derives tables of frozen and recomputed modules from few probes, `tensor_parallel.py` those of a degree
without probes, `tables.py` the others, and says which one serves; `link_costs.py` fits messages.

The model is asked with a load and a `RunMode`, in two ways. Packing needs loads that add up and takes the mean slope;
judging takes the curve. Far outside the probes the model refuses; planner and scheduler, which may never stand in the
way, ask it to extrapolate and say so.

Two kinds of seconds are kept apart, because a laptop has fewer cores than the demo has processes. *Compute seconds*
are thread CPU time on a CPU and wall time on a GPU: probes measure them, tables predict them, corrections compare
them. *Wall seconds* are what a step takes; how processes share cores is the simulator's business
(`ClusterSpec.max_concurrency`, `on_shared_cores` in `simulate/step.py`). `busy_s` of an observation is wall time, so
waiting for a core counts as busy; decoding the next step's media is in no predicted step.

scipy is imported for one call, non-negative least squares in `regression.py`.
"""

"""A plan and one global batch -> the `StepPlan` that ends soonest under the simulator.

`step_scheduler.py` takes the best of the candidates that `policies.py` makes: arrival order, length-grouped, longest
first on tokens and on all modules (`pack.py`, `place.py`), and the search on the simulator (`anneal.py`: slots of
ramped sizes, then simulated annealing over which sample is where and which slot runs when). The search sees a linear
step (`linear.py`, `state.py`); every candidate is judged by the cost model and the simulator (`evaluate.py`), and the
best one within what memory holds (`caps.py`) wins. Budgets count moves, so that every machine finds the same plan.

Without a pipeline only the sums of the ranks count, or, where ranks meet in every microbatch, the sum of the slots'
maxima: `data_parallel.py`, which the sampler uses, too. `attribution.py` says which sizes of items a microbatch's
seconds are of, for corrections. cvxpy is imported in `program.py` alone, the DFLOP paper's own way, for comparison.
"""

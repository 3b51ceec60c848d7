"""Seconds of microbatches -> factors on predicted seconds, and what has changed since the plan was made. Pure.

    seconds --Estimator--> level of a module, factor per size, factor per rank ----> StepPlans
       +----drift----> Decision `noticed` --> time it again, plan again; pays? --> another plan

`estimate.py` sorts items into sizes of equal shares of the seconds (`buckets.py`) and finds the factors with a Kalman
filter in information form (`filter.py`). `noise.py` tells a slow step of a whole rank from dozens of microbatches that
agree; `nodes.py` separates slow ranks from slow sizes. With one rank per module the two are not identifiable.

Three things are applied: the level of a module, outside a dead zone of 3 %; the factor of a slow rank, once several
steps in a row agree; the deviation of a size from its module's level, where it exceeds its own uncertainty, shrunk by
what chance would give all sizes of the module together. The dead zone of sizes lies around the level: one around 1
would invent imbalance when everything is slow alike. What memory holds is never corrected. `drift_detector.py` notices
changes of costs and of work.

Where this runs: `dflop/learn/learner.py`, in the scheduler process. docs/measured.md has what it is worth.
"""

"""What ranks measured -> factors in force, decisions, sizes to time again: `correct` at work in a job.

All of it runs in the scheduler process, next to training; ranks send seconds and nothing else (`RankTimes` in
`dflop/train/wire.py`). `learner.py` observes and gives factors; `decisions.py` makes rows of what somebody should
know, on disk every 15 s.

Factors come back by three ways. Within a job, `Learner.factors` is part of every StepPlan. Into the next start of a
scheduler, under another plan too, `learned_state.py` goes by the key-value store and by every checkpoint. Into later
runs `cost_inputs.py` brings the store's corrections for the same cost tables, decayed by their age in the snapshot
(`correct.half_life_days`): `factors_in_force` multiplies costs in plans, comparisons and the sampler; `earlier_runs`
is what an estimator begins with, uncertainties included, so that it decides anew what to act on. `remeasure.py` picks
the sizes that predictions are doubtful about and judges what a new probe says.
"""

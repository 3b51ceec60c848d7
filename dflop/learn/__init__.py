"""What ranks measured -> factors in force, decisions, sizes to time again: `correct` at work in a job.

All of it runs in the scheduler process, next to training; ranks send seconds and nothing else (`RankTimes` in
`dflop/train/wire.py`). `learner.py` observes and gives factors; `decisions.py` makes rows of what somebody should
know, on disk every 15 s.

Factors come back by three ways. Within a job, `Learner.factors` is part of every StepPlan. Into the next start of a
scheduler, under another plan too, `learned_state.py` goes by the key-value store and by every checkpoint. Into later
runs and into the planner, `cost_inputs.py` reads the store's corrections, decayed by age
(`correct.half_life_days`), for the same cost tables. `remeasure.py` picks the sizes that predictions are doubtful
about and judges what a new probe says.
"""

"""What one step of a run does where it is driven: profile, plan, train, re-plan, report.

The same functions are called by `dflop train` in a loop and by the flows as tasks. What is done already is found in
the store, in the folders of jobs and in checkpoints, so each may be called again at any time. What comes next follows
from what is on disk: whoever dies in between, the next driver goes on.

Planning and training take turns (`next_plan.py`, `training.py`; in a loop, `session.py`). `plan.json` changes only
while no training job runs, and earlier plans are kept; a job that has to make way is marked, told to stop, waited
for. A *stage* of training (`stages` in the configuration, for example projectors first) ends its job at its last
step; the next one has its own frozen modules, cost tables, memory and plan. What a stage freezes loses its optimizer
states, what it adds begins with none.

Re-planning (`replanning.py`) is asked when something was noticed. The present plan and new ones run the batches of
the steps that come, which are known, for order is a function of (seed, step). Seconds saved over the steps that are
left, scaled by how measured steps compare with simulated ones, are held against what this run's own start took:
queue, a checkpoint, and the time until somebody looks whether the job has stopped. It goes on under another plan when
the gain exceeds that cost and `replan.min_gain_frac`, and `replan.mode` is `act`. Sizes that are in doubt
(`dflop/learn/remeasure.py`) are timed again beside training (`training.py`); where the probe agrees with the table,
the cause is the machine and the online factor stays.

Steps that the cluster ended (node lost, preempted, lost job) run twice more (`is_infrastructure_failure` in
`follow.py`); a job's own failure ends the run. `preflight.py` finds what would keep a run from starting: `run` stops
at the first problem, `config validate` lists all.
"""

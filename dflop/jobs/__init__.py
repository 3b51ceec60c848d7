"""What runs on nodes: data profile, model profile with links, a rank, the scheduler, an export.

A training job is one process per seat of the plan (`train.py`, `rank.py`) and one scheduler
process (`scheduler.py`) that rank 0 starts. Inputs come from the run directory and, for the scheduler, from one
snapshot of the store; rows go out through the spool, and rank 0 spools every plan. No file and no database is on the
path of a step.

What happens when the scheduler is
- late: rank 0 makes a quick plan when its patience ends (`dflop/train/plan_source.py`, `fallback_plan.py`);
- behind: it sees which step is asked for and makes quick plans until it is ahead again;
- dead: rank 0 starts it again some steps later, `train.scheduler_restarts` times (`supervisor.py`); what it learnt
  survives in the key-value store;
- out of disk: rows stay in memory and are tried again, in ranks alike (`spool_writer.py`).
Each of these is a `RunEvent`. Kernels compile at the scheduler's start, in a folder on the node's own disk; plans are
quick until they are there.
"""

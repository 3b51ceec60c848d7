"""What slurm/train.sbatch asks before it starts ranks: `python -m dflop.run.by_hand RUN MODE TASKS`.

Prints how many processes the plan of the run has, and its directory; nothing where nothing is left to do.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dflop.errors import ConfigError, DflopError, did_you_mean
from dflop.run import driver_lock, lifecycle
from dflop.run.batches import COMPARE, TRAIN
from dflop.run.directory import RunDir
from dflop.run.find import find_run, runs_folder
from dflop.run.messages import say


def trainable_run(name: str, mode: str, num_tasks: int, runs: Path) -> RunDir | None:
    """The run, by a name for `find_run`, that a batch job is to train by hand; None where nothing is left to do.

    Raises:
        ConfigError: there is no such run or mode, it has no plan, or the plan needs another number of tasks.
        LaunchError: a driver trains it.
    """
    if mode not in (TRAIN, COMPARE):
        raise ConfigError(f"unknown mode `{mode}`", hint=did_you_mean(mode, (TRAIN, COMPARE)))
    run = find_run(name, runs)
    config = run.config()
    if mode == TRAIN and (lifecycle.is_finished(run) or run.next_step() >= config.train.num_steps):
        return None
    if not run.has_plan():
        raise ConfigError("the run has no plan yet", where=str(run.path), hint=f"dflop train {run.run_id} makes one")
    num_processes, per_node = run.plan().num_processes, config.cluster.num_processes_per_node
    if num_tasks != num_processes:
        nodes = f"--nodes={-(-num_processes // per_node)} --ntasks-per-node={min(per_node, num_processes)}"
        what = f"the job has {num_tasks} tasks, the plan needs {num_processes}"
        hint = f"sbatch {nodes} --ntasks={num_processes} slurm/train.sbatch {name}"
        raise ConfigError(what, where=str(run.path / "plan.json"), hint=hint)
    driver_lock.check_free(run, say)
    return run


def main() -> None:
    """The facts on stdout; errors as `dflop` shows them, with its exit codes."""
    name, mode, num_tasks = sys.argv[1:]
    try:
        run = trainable_run(name, mode, int(num_tasks), runs_folder())
    except DflopError as error:
        print(f"dflop: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if run is None:
        say(f"run `{name}` is finished, nothing to do; to train more, raise train.num_steps or use another name")
    else:
        print(run.plan().num_processes, run.path)


if __name__ == "__main__":
    main()

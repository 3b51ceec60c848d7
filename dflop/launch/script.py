"""The batch script of a job or of an array of jobs alike. It is all that Slurm gets, and all that a person needs.

What tasks run is written out in the script, so that a script that was submitted cannot be changed by a later one:
Slurm keeps its own copy. An array has one shape; a `case` says what each element does. `srun` stays between the script
and the tasks, because only it passes signals on to them, with --kill-on-bad-exit, or the peers of a dead rank would
hang until the time limit. It waits for ever where a node's slurmstepd has died, so the script looks itself whether all
is done. A job that can go on from a checkpoint starts itself again under its id: see `marks.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflop.errors import Interrupted, LaunchError, printable
from dflop.launch.job import JobHandle, JobSpec
from dflop.launch.marks import NUM_CHANCES, STOPS_VARIABLE
from dflop.launch.payload import import_environment, thread_environment
from dflop.launch.site import Site

SCRIPT_NAME = "job.sbatch"
BATCH_LOG, INTERRUPTED, MAKE_WAY, STOPS = "batch.log", "interrupted", "make_way", "stops"
"""Suffixes of a job's files: what the script and srun say; there when it ended with its state on disk, with why; there
when it was told to stop for good; where it was stopped."""
START_LINE = "dflop: start "
LOOKS_EVERY_S, ENDS_WITHIN_S = 15, 60
"""How often the script looks whether every task has left its result, and how long all of them may take to end then."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one call of sbatch submits."""

    specs: tuple[JobSpec, ...]
    """Several: elements of an array, alike but for entry and arguments."""
    positions: tuple[int, ...]
    """Of the specs among all that are submitted together."""
    script_name: str = SCRIPT_NAME

    @property
    def is_array(self) -> bool:
        return len(self.specs) > 1

    @property
    def name(self) -> str:
        """Of the job in Slurm, the beginning of the name of every element."""
        return self.specs[0].array if self.is_array else self.specs[0].name

    @property
    def folder(self) -> Path:
        return self.specs[0].folder.absolute()

    @property
    def script(self) -> Path:
        return self.folder / self.script_name

    def handles(self, job_id: str, at_s: float) -> list[JobHandle]:
        """One per spec, of the job that sbatch named."""
        return [
            JobHandle(
                "slurm", f"{job_id}_{element}" if self.is_array else job_id, spec.name, spec.key, self.folder,
                spec.resources.num_tasks, at_s,
            )
            for element, spec in enumerate(self.specs)
        ]  # fmt: skip


def batches(specs: Sequence[JobSpec], max_array_size: int) -> list[Batch]:
    """Jobs of one array name and one shape together, at most `max_array_size` of them; all others alone."""
    groups: list[list[int]] = []
    for position, spec in enumerate(specs):
        alike = (g for g in reversed(groups) if len(g) < max_array_size and _are_alike(specs[g[0]], spec))
        group = next(alike, None)
        if group is None:
            groups.append([position])
        else:
            group.append(position)
    found, num_in = [], dict[Path, int]()
    for group in groups:
        folder = specs[group[0]].folder.absolute()
        number = num_in[folder] = num_in.get(folder, 0) + 1
        name = SCRIPT_NAME if number == 1 else f"job-{number}.sbatch"
        found.append(Batch(tuple(specs[p] for p in group), tuple(group), name))
    return found


def _are_alike(a: JobSpec, b: JobSpec) -> bool:
    return (
        a.array != ""
        and (a.array, a.folder, a.resources, a.env, a.is_resumable)
        == (b.array, b.folder, b.resources, b.env, b.is_resumable)
    )  # fmt: skip


def render(batch: Batch, site: Site, comment: str) -> str:
    """Text of the batch script; a pure function of what it is given and the working directory.

    Raises:
        LaunchError: a folder or an option has a line break in it.
    """
    parts = [
        ["#!/bin/bash", *_about(batch)],
        [_flag(name, value) for name, value in options(batch, site, comment).items()],
        [*_place(batch), *_environment(batch.specs[0])],
        _setup(batch.specs[0].resources.setup),
        _what_to_run(batch),
        _run(batch, site),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _about(batch: Batch) -> Iterator[str]:
    if batch.is_array:
        yield f"# dflop jobs `{_one_line(batch.name)}`: an array of {len(batch.specs)}, what each runs is said below"
    else:
        yield f"# dflop job `{_one_line(batch.name)}`: {_one_line(_words(batch.specs[0]))}"
        yield f"# key {_one_line(batch.specs[0].key)}"
    yield f"# To run it again by hand: sbatch {_one_line(shlex.quote(str(batch.script)))}"


def options(batch: Batch, site: Site, comment: str) -> Mapping[str, str]:
    """Options of sbatch that the script sets; flags have empty values."""
    spec = batch.specs[0]
    r, id_pattern = spec.resources, "%A_%a" if batch.is_array else "%j"
    limit = f"%{site.max_jobs_at_once}" if site.max_jobs_at_once else ""
    log = f"{_literal(batch.folder)}/{id_pattern}_{BATCH_LOG}"
    wanted = {
        "job-name": batch.name,
        "comment": comment,
        **({"array": f"0-{len(batch.specs) - 1}{limit}"} if batch.is_array else {}),
        **({"partition": r.partition} if r.partition else {}),
        "nodes": str(r.num_nodes),
        # With the number of tasks the number per node is a maximum.
        **({"ntasks": str(r.num_tasks)} if r.num_idle_slots else {}),
        "ntasks-per-node": str(r.tasks_per_node),
        "cpus-per-task": str(r.cpus_per_task),
        **site.gpu_options(r.gpus_per_node),
        **({"mem": f"{r.memory_bytes // 2**20}M"} if r.memory_bytes and site.ask_for_memory else {}),
        "time": str(r.time_limit_min),
        "signal": f"USR2@{r.signal_delay_s(site.signal_delay_s)}",
        "requeue" if site.requeue else "no-requeue": "",
        "open-mode": "append",
        "chdir": str(Path.cwd()),
        "output": log,
    }
    return wanted | {name.replace("_", "-"): value for name, value in r.extra.items()}


def _flag(name: str, value: str) -> str:
    # sbatch reads these lines one by one and knows no quotes over several: what follows would be an option of its own.
    if printable(value) != value or "\n" in value:
        raise LaunchError(
            f"a line break or control character in sbatch's option --{name}: {value!r}",
            hint="rename the folder, or mend the value in the cluster file",
        )
    return f"#SBATCH --{name}={shlex.quote(value)}" if value else f"#SBATCH --{name}"


def _place(batch: Batch) -> Iterator[str]:
    element = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if batch.is_array else "$SLURM_JOB_ID"
    yield f"folder={shlex.quote(str(batch.folder))}"
    yield f"job={element}"
    yield f'echo "{START_LINE}$((${{SLURM_RESTART_COUNT:-0}} + 1)) of job $job on $SLURM_JOB_NODELIST"'
    # A job that Slurm has started again may have left tracebacks of the start before.
    yield f'rm -f "$folder/$job"_*_result.pkl "$folder/${{job}}_{INTERRUPTED}"'


def _environment(spec: JobSpec) -> Iterator[str]:
    # Here and not in the tasks: in a container there may be no scontrol.
    yield 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    variables = {**thread_environment(spec.resources.cpus_per_task), **import_environment(), **spec.env}
    yield from (f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items()))


def _setup(lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    failed = 'echo "dflop: a setup line of the cluster file failed: $BASH_COMMAND" >&2'
    return [
        "# From the cluster file.", f"trap {shlex.quote(failed)} ERR", "set -e", *lines, "set +e", "trap - ERR",
    ]  # fmt: skip


def _what_to_run(batch: Batch) -> list[str]:
    """What the tasks run becomes the script's arguments."""
    if not batch.is_array:
        return [f"set -- {_words(batch.specs[0])}"]
    cases = [
        f"{element}) set -- {_words(spec)} ;;  # {_one_line(spec.name)}" for element, spec in enumerate(batch.specs)
    ]
    unknown = f'*) echo "dflop: this array has elements 0 to {len(batch.specs) - 1}" >&2; exit 2 ;;'
    return ["case $SLURM_ARRAY_TASK_ID in", *cases, unknown, "esac"]


def _run(batch: Batch, site: Site) -> list[str]:
    spec = batch.specs[0]
    log = f"{shlex.quote(_literal(batch.folder))}/${{job}}_%t_log"
    options = [
        "--kill-on-bad-exit=1", "--unbuffered", "--open-mode=append",
        f"--cpus-per-task={spec.resources.cpus_per_task}",  # since 22.05 srun does not take it from the job
        f"--output={log}.out", f"--error={log}.err", *site.srun_options(),
    ]  # fmt: skip
    command = f'{site.task_command(has_gpus=spec.resources.gpus_per_node > 0)} "$folder" "$job" "$@"'
    run = [
        "srun " + " \\\n    ".join([*options, f"{command} &"]),
        "srun=$!",
        *_until_srun_ends(spec.resources.num_tasks),
    ]
    return [*_count(), *run, "", *_go_on(site)] if spec.is_resumable else [*run, 'exit "$code"']


def _until_srun_ends(num_tasks: int) -> list[str]:
    return [
        "",
        "# Where a slurmstepd has died, srun is never told that the tasks of its node are over. What they left tells.",
        "(",
        '    pause() { sleep "$1" & nap=$!; wait "$nap"; }',
        "    trap 'kill \"$nap\" 2>/dev/null; exit' TERM",
        '    num_results() { ls "$folder/$job"_*_result.pkl 2>/dev/null | wc -l; }',
        f"    while (($(num_results) < {num_tasks})); do pause {LOOKS_EVERY_S}; done",
        f"    pause {ENDS_WITHIN_S}",
        f'    echo "dflop: all tasks left their results {ENDS_WITHIN_S} s ago, but srun waits; it is killed" >&2',
        '    kill -KILL "$srun"',
        ") &",
        "looking=$!",
        "disown",
        'wait "$srun"',
        "code=$?",
        'kill "$looking" 2>/dev/null',
    ]


def _count() -> list[str]:
    return [
        f"export {STOPS_VARIABLE}=$folder/${{job}}_{STOPS}",
        f'num_stops() {{ cat "${STOPS_VARIABLE}" 2>/dev/null | wc -l; }}',
        "before=$(num_stops)",
    ]


def _go_on(site: Site) -> list[str]:
    moved = f"$1 < $2 {{ moved = 1 }} END {{ exit moved || NR < {NUM_CHANCES} }}"
    nowhere = f"tail -n {NUM_CHANCES} \"${STOPS_VARIABLE}\" | awk '{moved}'"
    requeue = [
        'elif scontrol requeue "$SLURM_JOB_ID"; then',
        '    echo "dflop: its state is on disk; requeued"',
        "    exit 0",
        "else",
        '    why="this site does not requeue"',
    ]
    return [
        "# Ranks that were told to stop (time limit, preemption) have left a line: where they began, where they are.",
        "# The code of srun does not tell: it is 137 where one rank leaves some ms after another.",
        "if (($(num_stops) > before)); then",
        f"    if [[ -e $folder/${{job}}_{MAKE_WAY} ]]; then",
        '        why="it was told to make way"',
        f"    elif {nowhere}; then",
        f'        why="it was stopped {NUM_CHANCES} times before it got anywhere"',
        *(f"    {line}" for line in (requeue if site.requeue else ["else", '    why="it is not to be requeued"'])),
        "    fi",
        f'    echo "$why" >"$folder/${{job}}_{INTERRUPTED}"',
        f"    exit {Interrupted.exit_code}",
        "fi",
        'exit "$code"',
    ]


def _words(spec: JobSpec) -> str:
    return shlex.join([spec.entry, *spec.args])


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _literal(folder: Path) -> str:
    """A path in which Slurm replaces nothing."""
    return str(folder).replace("%", "%%")

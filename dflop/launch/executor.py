"""Submits jobs alike to Slurm, several as an array: submitit's executor, whose batch script says what it runs.

The script is all that a person needs: its first lines say in words what each element runs, and `job.sbatch` beside it
does the same work again by hand. The pickle gets the job's id as its name once sbatch has said it. A job of which
nobody heard (its driver died, or sbatch timed out after the controller had accepted it) is found in the queue by the
path of its script; where squeue does not show that, it finds no work and ends by itself within a minute.

`srun` stays between the script and the tasks, because only it passes signals on, with --kill-on-bad-exit, or the peers
of a dead rank would hang until the time limit. A job that can go on from a checkpoint is requeued by its script once
srun has ended, and not, as submitit does it, by a signal handler of rank 0: all ranks have to stop after one step, and
in a container there may be no scontrol.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from dflop.config import ContainerConfig, SlurmConfig
from dflop.config.slurm_refusals import keys_of_refusal, refusal
from dflop.errors import Interrupted, LaunchError, printable
from dflop.launch import commands
from dflop.launch.commands import NotNow, last_line
from dflop.launch.job import BY_HAND, SCRIPT, SUBMITTED, JobSpec, make_folder, submission_folder
from dflop.launch.payload import NUM_CHANCES, START_LINE, STOPS_VARIABLE, Payload, task_environment
from dflop.launch.results import BATCH_LOG, CLUSTER, INTERRUPTED
from dflop.launch.watcher import EXIT

MAKE_WAY, STOPS = "make_way", "stops"
"""Suffixes of files of a job that was told to stop for good, or stopped."""
LOOKS_EVERY_S, ENDS_WITHIN_S = 15, 60
"""How often the script looks whether every task has left its result, and how long all of them may take to end then."""
SUBMIT_TIMEOUT_S = 600  # sbatch itself tries again while the controller is busy
_AGAIN = "again="
_BLOCK_USR2 = (
    "sh", "-c",
    'trap "" USR2; env --block-signal=USR2 true 2>/dev/null && exec env --block-signal=USR2 "$@"; exec "$@"', "sh",
)  # fmt: skip
"""Starts a command for which SIGUSR2 waits until it asks for it; by default it would be killed. Where `env` is too old
(coreutils before 8.31) an early signal is lost."""


def batches(specs: Sequence[JobSpec]) -> list[list[int]]:
    """Positions of specs that go to sbatch together: those of one array name and shape."""
    groups: list[tuple[object, list[int]]] = []
    for n, spec in enumerate(specs):
        shape = (spec.array, spec.folder, spec.resources, spec.env, spec.is_resumable) if spec.array else n
        group = next((g for of, g in groups if of == shape), None)
        if group is None:
            groups.append((shape, group := []))
        group.append(n)
    return [group for _, group in groups]


class Executor(SlurmExecutor):
    """Submits jobs of one shape, with a comment that names their run.

    Raises:
        LaunchError: a folder or an option has a line break in it, or the folder what Slurm would replace.
    """

    def __init__(self, specs: Sequence[JobSpec], site: SlurmConfig, comment: str, *, is_by_hand: bool = False) -> None:
        spec, r = specs[0], specs[0].resources
        folder = spec.folder.absolute() / BY_HAND if is_by_hand else submission_folder(spec.folder)
        super().__init__(folder, python=_python(site.container, has_gpus=r.gpus_per_node > 0))
        self.specs = specs
        self.job_name = spec.array if len(specs) > 1 else spec.name
        log = f"{self.folder}/{'%A_%a' if len(specs) > 1 else '%j'}_{BATCH_LOG}"
        options = {
            "comment": comment, "requeue" if site.requeue else "no-requeue": True, "chdir": str(Path.cwd()),
            "output": log, "error": log, **_gpu_options(site, r.gpus_per_node),
            # With the number of tasks the number per node is a maximum.
            **({"ntasks": r.num_tasks} if r.num_idle_slots else {}),
            **({"mem": f"{r.memory_bytes // 2**20}M"} if r.memory_bytes and site.ask_for_memory else {}),
            **{name: value or True for name, value in r.extra.items()},
        }  # fmt: skip
        # sbatch reads these lines one by one and knows no quotes over several: what follows would be an option.
        for name, value in {"job-name": self.job_name, "partition": r.partition, **options}.items():
            if printable(str(value)) != str(value) or "\n" in str(value):
                what = f"a line break or control character in sbatch's option --{name}: {value!r}"
                raise LaunchError(what, hint="rename the folder, or fix the value in the cluster file")
        if "%" in str(self.folder):
            what = "Slurm would replace the `%` in the name of the folder"
            raise LaunchError(what, where=str(self.folder), hint="rename it")
        self.update_parameters(
            job_name=self.job_name, partition=r.partition or None, time=r.time_limit_min, nodes=r.num_nodes,
            ntasks_per_node=r.tasks_per_node, cpus_per_task=r.cpus_per_task, wckey=None,
            signal_delay_s=r.signal_delay_s(site.signal_delay_s), array_parallelism=site.max_jobs_at_once or len(specs),
            srun_args=[
                "--kill-on-bad-exit=1", "--open-mode=append",
                f"--cpus-per-task={r.cpus_per_task}",  # since 22.05 srun does not take it from the job
                *_srun_options(site),
            ],
            setup=_setup(spec, self.folder), teardown=_requeue_lines(site) if spec.is_resumable else None,
            additional_parameters={name.replace("-", "_"): value for name, value in options.items()},
        )  # fmt: skip
        if len(specs) > 1:
            self.parameters["map_count"] = len(specs)

    @classmethod
    def affinity(cls) -> int:
        return 2  # the launcher has looked for Slurm, and a dry run needs none

    def script_text(self) -> str:
        """The batch script; a function of what it is given and the working directory."""
        return self._make_submission_file_text(self._submitit_command_str, "")

    def save(self, payload: Payload) -> Path:
        """Write the batch script of one job for a person to submit, and what it runs; returns the script's path."""
        make_folder(self.specs[0].folder)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        DelayedSubmission(payload).dump(self.folder / f"{BY_HAND}.pkl")
        (self.folder / SCRIPT).write_text(_that_runs(f"{BY_HAND}.pkl", self.script_text()))
        return self.folder / SCRIPT

    def options(self) -> dict[str, str]:
        """Options of sbatch that the script sets; flags have empty values."""
        flags = re.findall(r"^#SBATCH --(.*)$", self.script_text(), re.MULTILINE)
        return {name: value for name, _, value in (shlex.split(flag)[0].partition("=") for flag in flags)}

    def _num_tasks(self) -> int:
        return self.specs[0].resources.num_tasks

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        shebang, _, rest = super()._make_submission_file_text(command, uid).partition("\n")
        runs = [f"{shlex.join([spec.entry, *spec.args])}  (key {spec.key})" for spec in self.specs]
        about = [f"dflop job `{self.job_name}`: {runs[0]}"]
        if len(runs) > 1:
            about = [f"dflop jobs `{self.job_name}`, an array of {len(runs)}. What each element runs:"]
            about += [f"  {element}: {what}" for element, what in enumerate(runs)]
        about.append(f"To run it again by hand: sbatch {shlex.quote(str(self.folder / SCRIPT))}")
        return "\n".join([shebang, *(f"# {' '.join(line.splitlines())}" for line in about), rest])

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        # With several clusters `123;name`; plugins of a site may talk before it.
        found = re.search(r"^\d+(;\S+)?$", last_line(str(string)))
        return found[0] if found else ""

    def _submit_command(self, command: str) -> SlurmJob[Any]:
        script, text = self.folder / SCRIPT, self._make_submission_file_text(command, "")
        accepted = self._accepted(str(script), is_same=script.read_text() == text) if script.exists() else ""
        script.write_text(text)
        job_id, _, cluster = (accepted or self._sbatch(script)).partition(";")
        if cluster:
            (self.folder / CLUSTER).write_text(cluster)
        script.write_text(_that_runs(f'"{job_id}${{element}}{SUBMITTED}"', text))
        return SlurmJob(self.folder, job_id, range(self._num_tasks()))

    def _accepted(self, script: str, *, is_same: bool) -> str:
        """Id of a job that an earlier sbatch of the same script left in the queue though nobody heard its answer.

        One that has begun has found no work, so it is ended; so is one whose script was another.
        """
        states: dict[str, set[str]] = {}
        for job_id, state, path, *_ in commands.rows_of_queue():
            if path == script:
                states.setdefault(job_id.partition("_")[0], set()).add(state)
        waiting = next((job_id for job_id, of in states.items() if is_same and of == {"PENDING"}), "")
        commands.scancel(*(job_id for job_id in states if job_id != waiting))
        return waiting

    def _sbatch(self, script: Path) -> str:
        # submitit's own prints what sbatch says, and hands it what a surrounding job left in the environment.
        environment = commands.job_environment(os.environ, self.options())
        done = commands.run_command(["sbatch", "--parsable", str(script)], environment, timeout_s=SUBMIT_TIMEOUT_S)
        said = self._get_job_id_from_submission_command(done.stdout) if done.returncode == 0 else ""
        if not said:
            raise self._refusal(done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}")
        return said

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        # submitit's own makes arrays with an executor and jobs of its own classes, which lack what is overridden here.
        self.folder.mkdir(mode=0o700, exist_ok=True)
        pickles = [self.folder / f"work_{n}.pkl" for n in range(len(delayed_submissions))]
        for submission, path in zip(delayed_submissions, pickles, strict=True):
            submission.dump(path)
        first = self._submit_command(self._submitit_command_str)
        ids = [f"{first.job_id}_{n}" for n in range(len(pickles))] if len(pickles) > 1 else [first.job_id]
        jobs: list[Job[Any]] = [SlurmJob(self.folder, job_id, range(self._num_tasks())) for job_id in ids]
        for job, path in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(path, "submitted_pickle")
        return jobs

    def _refusal(self, said: str) -> LaunchError:
        where = str(self.folder / SCRIPT)
        if commands.is_away(said):
            what = f"Slurm's controller does not respond, so job `{self.job_name}` is not submitted: {last_line(said)}"
            return NotNow(what, where=where, hint="start again when `sinfo` responds")
        hint = f"check {keys_of_refusal(said)}{'; or cluster.slurm.extra' if self.specs[0].resources.extra else ''}"
        kind = NotNow if (why := refusal(said)) and not why.is_for_ever and why.key == "jobs" else LaunchError
        return kind(f"sbatch refused job `{self.job_name}`: {said}", where=where, hint=hint)


def _that_runs(pickle: str, text: str) -> str:
    """A batch script that runs a pickle of its folder when a person submits it."""
    return text.replace(f"\n{_AGAIN}\n", f"\n{_AGAIN}{pickle}\n")


def _gpu_options(site: SlurmConfig, num_gpus: int) -> dict[str, str]:
    """Options that ask for so many GPUs per node; none at zero: clusters without refuse even that."""
    if not num_gpus or site.gpus == "none":
        return {}
    kind = f"{site.gpu_type}:" if site.gpu_type else ""
    return {"gres": f"gpu:{kind}{num_gpus}"} if site.gpus == "gres" else {"gpus-per-node": f"{kind}{num_gpus}"}


def _srun_options(site: SlurmConfig) -> list[str]:
    box = site.container
    if box is None or box.runtime != "pyxis":
        return [*site.srun_args]
    # Pyxis wants source and target; a folder that is mounted where it is has one name.
    mounts = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in box.mounts)
    into = [f"--container-image={box.image}", *([f"--container-mounts={mounts}"] if mounts else [])]
    return [*site.srun_args, *into, *box.args]


def _python(box: ContainerConfig | None, *, has_gpus: bool) -> str:
    """What starts Python, quoted for a shell."""
    words = [*_BLOCK_USR2]
    if box is not None and box.runtime == "apptainer":
        mounts = [word for mount in box.mounts for word in ("--bind", mount)]
        words += ["apptainer", "exec", *(["--nv"] if has_gpus else []), *mounts, *box.args, box.image]
    return shlex.join([*words, sys.executable if box is None else box.python, "-P"])


def _setup(spec: JobSpec, folder: Path) -> list[str]:
    """Lines before srun."""
    failed = 'echo "dflop: a setup line of the cluster file failed: $BASH_COMMAND" >&2'
    ours = spec.resources.setup
    return [
        f"folder={shlex.quote(str(folder))}",
        "element=${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}",
        "job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}$element",
        f'echo "{START_LINE}$((${{SLURM_RESTART_COUNT:-0}} + 1)) of job $job on $SLURM_JOB_NODELIST"',
        "# What it runs when a person submits it.", _AGAIN,
        f'[ -z "$again" ] || ln -sf "$again" "$folder/${{job}}{SUBMITTED}"',
        "# What a start before this one has left.",
        f'rm -f "$folder/$job"_*_result.pkl* "$folder/${{job}}_{EXIT}" "$folder/${{job}}_{INTERRUPTED}"',
        "unset SLURM_CLUSTERS  # commands of this script ask the cluster that runs it",
        "# Here and not in the tasks: in a container there may be no scontrol.",
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(task_environment(spec).items())),
        f"export {STOPS_VARIABLE}=$folder/${{job}}_{STOPS}",
        f'num_stops() {{ cat "${STOPS_VARIABLE}" 2>/dev/null | wc -l; }}', "before=$(num_stops)",
        "# Where a slurmstepd has died, srun never learns that the tasks of its node ended. Their results show it.",
        '(while (($(ls "$folder/$job"_*_result.pkl 2>/dev/null | wc -l) < '
        f"{spec.resources.num_tasks})); do sleep {LOOKS_EVERY_S}; done; sleep {ENDS_WITHIN_S}",
        f' echo "dflop: all tasks left their results {ENDS_WITHIN_S} s ago, but srun waits; it is killed" >&2',
        " pkill -KILL -x -P $$ srun) &", "looking=$!; disown",
        "# The exit code, for a Slurm that has forgotten the job.",
        f"""trap 'code=$?; kill $looking 2>/dev/null; echo "$code" >"$folder/${{job}}_{EXIT}"' EXIT""",
        *(["# From the cluster file.", f"trap {shlex.quote(failed)} ERR; set -e", *ours, "set +e; trap - ERR"]
          if ours else []),
    ]  # fmt: skip


def _requeue_lines(site: SlurmConfig) -> list[str]:
    """Lines after srun, of a job that goes on from a checkpoint."""
    nowhere = (
        f'tail -n {NUM_CHANCES} "${STOPS_VARIABLE}" |'
        f" awk '$1 < $2 {{ moved = 1 }} END {{ exit moved || NR < {NUM_CHANCES} }}'"
    )
    requeue = [
        '  elif scontrol requeue "$SLURM_JOB_ID"; then',
        '    echo "dflop: its state is on disk; requeued"; kill $looking 2>/dev/null; trap - EXIT; exit 0',
        '  else why="this site does not requeue"; fi',
    ]
    return [
        "code=$?",
        "# Ranks that were signalled to stop (time limit, preemption) wrote a line: first step, last step.",
        "# The exit code of srun does not say: it is 137 where one rank leaves some ms after another.",
        "if (($(num_stops) > before)); then",
        f'  if [[ -e $folder/${{job}}_{MAKE_WAY} ]]; then why="it made room for another plan"',
        f'  elif {nowhere}; then why="it was stopped {NUM_CHANCES} times without progress"',
        *(requeue if site.requeue else ['  else why="it is not to be requeued"; fi']),
        f'  echo "$why" >"$folder/${{job}}_{INTERRUPTED}"; code={Interrupted.exit_code}',
        "fi",
        'exit "$code"',
    ]

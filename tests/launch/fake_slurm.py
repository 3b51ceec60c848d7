"""A Slurm without Slurm: sbatch, srun, squeue, scontrol, scancel and sacct as far as the launcher uses them.

`install(folder)` leaves clients in `folder/bin`; with that first on PATH, batch scripts really run, on this machine.
Every client is this file, called as `python fake_slurm.py FOLDER CLIENT ARGS...`. A job is a JSON file; whoever changes
one holds the lock. No queue: what is not held starts at once. Nothing is imported that takes time to start.
"""

import contextlib
import fcntl
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

CLIENTS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sacct")
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


def install(folder):
    """The folder to put on PATH."""
    os.makedirs(f"{folder}/bin")
    os.makedirs(f"{folder}/jobs")
    for client in CLIENTS:
        path = f"{folder}/bin/{client}"
        with open(path, "w") as file:
            file.write(f'#!/bin/sh\nexec {sys.executable} -S -E {os.path.abspath(__file__)} {folder} {client} "$@"\n')
        os.chmod(path, 0o755)
    return f"{folder}/bin"


def answer(folder, args):
    """What a client says, without a process: for those who ask often."""
    out, code, error = io.StringIO(), 0, ""
    with contextlib.redirect_stdout(out):
        try:
            asked(folder, *args)
        except SystemExit as end:
            code, error = 1, str(end.code)
    return subprocess.CompletedProcess(args, code, out.getvalue(), error)


class Jobs:
    """All jobs, by id; written back when the block ends. Only so may anybody look: a file may be half written."""

    def __init__(self, folder):
        self.folder = folder

    def __enter__(self):
        self.lock = open(f"{self.folder}/lock", "w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.all = {}
        for name in os.listdir(f"{self.folder}/jobs"):
            with open(f"{self.folder}/jobs/{name}") as file:
                self.all[name] = json.load(file)
        self.before = json.loads(json.dumps(self.all))
        return self.all

    def __exit__(self, *_):
        for job_id, job in self.all.items():
            if job != self.before.get(job_id):
                with open(f"{self.folder}/jobs/{job_id}", "w") as file:
                    json.dump(job, file)
        self.lock.close()


def sbatch(folder, *args):
    script = os.path.abspath(args[-1])
    with open(f"{folder}/calls", "a") as file:
        file.write(json.dumps({"sbatch": args, "environment": sorted(os.environ)}) + "\n")
    with open(script) as file:
        text = file.read()
    options = {}
    for line in re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE):
        name, _, value = shlex.split(line)[0][2:].partition("=")
        options[name] = value
    if os.path.exists(f"{folder}/down"):
        sys.exit("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)")
    if options.get("partition") == "nowhere":
        sys.exit("sbatch: error: invalid partition specified: nowhere")
    if os.path.exists(f"{folder}/refuse"):
        with open(f"{folder}/refuse") as file:
            sys.exit(file.read())
    if "mem" in options and os.path.exists(f"{folder}/no_memory"):
        sys.exit("sbatch: error: Memory specification can not be satisfied")
    reason = "PartitionTimeLimit" if os.path.exists(f"{folder}/never") else "JobHeldUser"
    prefix = "proj42-" if os.path.exists(f"{folder}/lua") else ""
    with Jobs(folder) as jobs:
        base = str(1 + max([int(job_id.split("_")[0]) for job_id in jobs], default=100))
        first, _, last = options["array"].partition("%")[0].partition("-") if "array" in options else ("", "", "")
        elements = range(int(first), int(last) + 1) if "array" in options else [None]
        for element in elements:
            job_id = base if element is None else f"{base}_{element}"
            jobs[job_id] = {
                "name": prefix + options["job-name"], "command": script, "comment": options.get("comment", ""),
                "script": text,
                "options": options, "state": "PENDING", "reason": reason if "hold" in options else "None",
                "restarts": 0, "submit": int(time.time()), "base": base, "element": element, "code": 0,
                "raw": str(900 + len(jobs)), "tasks": [], "pid": 0,
            }  # fmt: skip
            if "hold" not in options:
                jobs[job_id]["state"] = "RUNNING"
                start(folder, job_id)
    if os.path.exists(f"{folder}/late"):
        sys.exit("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    print(f"{base};{cluster_of(folder)}" if cluster_of(folder) else base)


def start(folder, job_id):
    command = [sys.executable, "-S", "-E", __file__, folder, "run", job_id]
    null = subprocess.DEVNULL  # not the pipes of whoever called sbatch, who would wait for us
    subprocess.Popen(command, start_new_session=True, stdin=null, stdout=null, stderr=null)


def run(folder, job_id):
    """slurmd: runs the batch script, again as long as the job is requeued."""
    while True:
        with Jobs(folder) as jobs:
            job = jobs[job_id]
            if job["state"] in FINAL:  # cancelled before this process came
                return
            job["state"], job["pid"] = "RUNNING", os.getpid()
        o, element = job["options"], job["element"]
        per_node, nodes = int(o["ntasks-per-node"]), int(o["nodes"])
        env = os.environ | {
            "SLURM_JOB_ID": job["raw"] if element is not None else job_id,
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": o.get("ntasks", str(per_node * nodes)),
            "SLURM_RESTART_COUNT": str(job["restarts"]),
            "FAKE_JOB": job_id,
        }
        if element is not None:
            env |= {"SLURM_ARRAY_JOB_ID": job["base"], "SLURM_ARRAY_TASK_ID": str(element)}
        script = f"{folder}/{job_id}.sh"
        with open(script, "w") as file:
            file.write(job["script"])
        output = o["output"].replace("%A_%a", job_id).replace("%j", job_id)
        with open(output, "a") as log:
            code = subprocess.call(["bash", script], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        with Jobs(folder) as jobs:
            job = jobs[job_id]
            if job["state"] == "RUNNING":
                job["state"], job["code"] = ("FAILED", code) if code else ("COMPLETED", 0)
                job["reason"] = "NonZeroExitCode" if code else "None"
            if job["state"] != "PENDING":
                return


def srun(folder, *args):
    args = list(args)
    options = {}
    while args[0].startswith("--"):
        name, _, value = args.pop(0)[2:].partition("=")
        options[name] = value or (args.pop(0) if name in ("output", "error") else "")
    num_tasks, tasks = int(os.environ["SLURM_NTASKS"]), []
    job_id = os.environ["FAKE_JOB"]
    with Jobs(folder) as jobs:
        job = jobs[job_id]
        if job["state"] != "RUNNING":
            sys.exit("srun: error: the job was cancelled")
        for rank in range(num_tasks):
            env = os.environ | {
                "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
                "SLURM_STEP_TASKS_PER_NODE": str(num_tasks), "MASTER_ADDR": "127.0.0.1",
            }  # fmt: skip
            paths = [
                options[o].replace("%A_%a", job_id).replace("%j", job_id).replace("%t", str(rank))
                for o in ("output", "error")
            ]
            out, err = (os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for path in paths)
            tasks.append(subprocess.Popen(args, env=env, stdout=out, stderr=err, stdin=subprocess.DEVNULL))
        job["tasks"] = [task.pid for task in tasks]
    worst = 0
    while True:
        codes = [task.poll() for task in tasks]
        bad = [(rank, code) for rank, code in enumerate(codes) if code]
        if bad and not worst:
            rank, code = bad[0]
            how = signal.strsignal(-code) if code < 0 else f"Exited with exit code {code}"
            print(f"srun: error: localhost: task {rank}: {how}", file=sys.stderr, flush=True)
            worst = code if code > 0 else 128 - code
            for task in tasks:
                with contextlib.suppress(ProcessLookupError):
                    task.kill()
        if None not in codes:
            sys.exit(worst)
        time.sleep(0.02)


def squeue(folder, *args):
    if os.path.exists(f"{folder}/down"):
        sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    with open(f"{folder}/calls", "a") as file:
        file.write(json.dumps({"squeue": args}) + "\n")
    wanted = args[args.index("-j") + 1].split(",") if "-j" in args else None
    with Jobs(folder) as jobs:
        rows = {i: j for i, j in jobs.items() if wanted is None or j["base"] in wanted or i in wanted}
    if wanted and not rows:
        sys.exit("slurm_load_jobs error: Invalid job id specified")
    for job_id, job in rows.items():
        if "-o" in args and job["state"] not in FINAL:
            row = {"%i": job_id, "%T": job["state"], "%o": job["command"], "%k": job["comment"], "%j": job["name"]}
            print(re.sub("%.", lambda match, row=row: row[match[0]], args[args.index("-o") + 1]))
        elif "-o" not in args and ("-t" in args or job["state"] not in FINAL):
            row = job["state"], job["submit"], "N/A", "localhost", job["reason"], job["command"]
            print(job["restarts"], job_id, *row, sep="|")


def scontrol(folder, *args):
    args = [arg for arg in args if arg != "-o"]
    if args[:2] == ["show", "hostnames"]:
        print("127.0.0.1")
    elif args[:2] == ["show", "job"]:
        with Jobs(folder) as jobs:
            found = {i: j for i, j in jobs.items() if args[2] in (i, j["base"])}
        if not found:
            sys.exit("slurm_load_jobs error: Invalid job id specified")
        for job_id, job in found.items():
            array = f"ArrayJobId={job['base']} ArrayTaskId={job['element']} " if job["element"] is not None else ""
            print(
                f"JobId={job_id if not array else job['raw']} {array}JobName={job['name']} UserId=root(0) "
                f"JobState={job['state']} Reason={job['reason']} Restarts={job['restarts']} SubmitTime={job['submit']} "
                f"TimeLimit={'00:01:00' if os.path.exists(f'{folder}/lua') else '01:00:00'} Comment={job['comment']}"
            )
    elif args[0] == "update":
        with Jobs(folder) as jobs:
            jobs[args[1].partition("=")[2]] |= dict(arg.split("=", 1) for arg in args[2:])
    elif args[0] == "requeue":
        if os.path.exists(f"{folder}/no_requeue"):
            sys.exit("scontrol: error: Requested operation is presently disabled")
        with Jobs(folder) as jobs:
            (job,) = [j for i, j in jobs.items() if args[1] in (i, j["raw"])]
            job |= {"state": "PENDING", "reason": "BeginTime", "restarts": job["restarts"] + 1}
            job["submit"] = max(int(time.time()), job["submit"] + 1)


def scancel(folder, *args):
    number = next((getattr(signal, f"SIG{a[9:]}") for a in args if a.startswith("--signal=")), None)
    is_pending_only = "--state=PENDING" in args
    if os.path.exists(f"{folder}/down"):
        sys.exit("scancel: error: Unable to contact slurm controller (connect failure)")
    with Jobs(folder) as jobs:
        for wanted in (arg for arg in args if not arg.startswith("--")):
            found = {i: j for i, j in jobs.items() if wanted in (i, j["base"]) and j["state"] not in FINAL}
            if not found:
                print(f"scancel: error: Kill job error on job id {wanted}: Invalid job id specified", file=sys.stderr)
            for job in found.values():
                if is_pending_only and job["state"] != "PENDING":
                    continue
                if number is None:
                    job |= {"state": "CANCELLED", "reason": "None"}
                for pid in job["tasks"]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number or signal.SIGKILL)


def sacct(*_):
    sys.exit("Slurm accounting storage is disabled")


def cluster_of(folder):
    """Name of the cluster; empty where it is the only one."""
    with contextlib.suppress(FileNotFoundError), open(f"{folder}/cluster") as file:
        return file.read()
    return ""


def asked(folder, client, *args):
    """A client; where the folder has a file `cluster`, only who asks for that cluster learns of jobs."""
    if client in ("squeue", "scancel", "sacct") and cluster_of(folder):
        if args[:2] != ("-M", cluster_of(folder)):
            sys.exit(f"{client}: error: Invalid job id specified")
        args = args[2:]
    globals()[client](folder, *args)


if __name__ == "__main__":
    asked(sys.argv[1], *sys.argv[2:])

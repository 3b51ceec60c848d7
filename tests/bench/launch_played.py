"""Slurm's clients as a clock would play them: the elements of an array end one after the other, nothing runs.

`install(folder, duration_s)` leaves clients in `folder/bin`. What they cost is mostly the start of a Python; that of
the real ones is of the same order.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import time

CLIENTS = ("sbatch", "squeue", "scontrol", "scancel", "sacct")


def install(folder, duration_s):
    """The folder to put on PATH; a job ends, evenly among its array, within `duration_s`."""
    os.makedirs(f"{folder}/bin")
    for client in CLIENTS:
        path = f"{folder}/bin/{client}"
        with open(path, "w") as file:
            words = f"{sys.executable} -S -E {os.path.abspath(__file__)} {folder} {duration_s} {client}"
            file.write(f'#!/bin/sh\nexec {words} "$@"\n')
        os.chmod(path, 0o755)
    return f"{folder}/bin"


def arrays(folder):
    found = {}
    for name in os.listdir(folder):
        if name.endswith(".json"):
            with open(f"{folder}/{name}") as file:
                found[name[:-5]] = json.load(file)
    return found


def sbatch(folder, duration_s, *args):
    with open(args[-1]) as file:
        text = file.read()
    array = re.search(r"^#SBATCH --array=0-(\d+)", text, re.MULTILINE)
    job_id = str(100 + len(arrays(folder)))
    job = {
        "num": int(array[1]) + 1 if array else 1,
        "is_array": array is not None,
        "name": re.search(r"^#SBATCH --job-name=(\S+)", text, re.MULTILINE)[1],
        "folder": os.path.dirname(os.path.abspath(args[-1])),
        "at_s": time.time(),
    }
    with open(f"{folder}/{job_id}.json", "w") as file:
        json.dump(job, file)
    null = subprocess.DEVNULL
    play = [sys.executable, "-S", "-E", os.path.abspath(__file__), folder, duration_s, "play", job_id]
    subprocess.Popen(play, stdin=null, stdout=null, stderr=null, start_new_session=True)
    print(job_id)


def end_s(job, element, duration_s):
    return job["at_s"] + float(duration_s) * (element + 1) / job["num"]


def play(folder, duration_s, job_id):
    """Leaves the results when their jobs end."""
    job = arrays(folder)[job_id]
    for element in range(job["num"]):
        time.sleep(max(0.0, end_s(job, element, duration_s) - time.time()))
        name = f"{job_id}_{element}" if job["is_array"] else job_id
        path = f"{job['folder']}/{name}_0_result.pkl"
        with open(f"{path}.partial", "wb") as file:
            pickle.dump(("success", element), file)
        os.rename(f"{path}.partial", path)


def squeue(folder, duration_s, *args):
    wanted = args[args.index("-j") + 1].split(",")
    now = time.time()
    for job_id, job in arrays(folder).items():
        if job_id not in wanted:
            continue
        for element in range(job["num"]):
            left_s = end_s(job, element, duration_s) - now
            state = "COMPLETED" if left_s <= 0 else "RUNNING" if left_s < 2 else "PENDING"
            reason = "JobArrayTaskLimit" if state == "PENDING" else "None"
            name = f"{job_id}_{element}" if job["is_array"] else job_id
            print(name, state, int(job["at_s"]), "N/A", reason, job["name"], sep="|")


def scontrol(folder, duration_s, *args):
    print("MaxArraySize            = 1001")


def scancel(folder, duration_s, *args):
    """Nobody waits for what is played."""


def sacct(folder, duration_s, *args):
    sys.exit("Slurm accounting storage is disabled")


if __name__ == "__main__":
    globals()[sys.argv[3]](sys.argv[1], sys.argv[2], *sys.argv[4:])

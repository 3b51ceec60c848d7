"""Producers and an ingester that are killed again and again; run as a process of its own.

    python -m tests.store.campaign STORE SEED NUM_KILLS NUM_PRODUCERS

Every producer appends to STORE/acknowledged/<producer> the ids of rows whose flush has returned. A row carries a
checksum of its id. The parent forks its children before anything has started a thread, so a restart takes
milliseconds; it prints how many of each it has killed.
"""

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from dflop.records import Correction
from dflop.store.ingest import ingest
from dflop.store.spool import SpoolWriter


def checksum(row_id: int, producer: str) -> float:
    return int.from_bytes(hashlib.sha256(f"{producer}:{row_id}".encode()).digest()[:6]) / 2**48


def produce(root: Path, producer: str, first_id: int) -> None:
    acknowledged = os.open(root / "acknowledged" / producer, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    writer = SpoolWriter(root, "run", producer)
    row_id = first_id
    while True:
        ids = range(row_id, row_id + 1 + row_id % 40)
        for i in ids:
            writer.append(Correction("run", i, "llm", producer, checksum(i, producer), 0.1, 1, 0.0))
        writer.flush()
        os.write(acknowledged, "".join(f"{i}\n" for i in ids).encode())
        row_id = ids[-1] + 1
        time.sleep(0.02)


def keep_ingesting(root: Path) -> None:
    while True:
        ingest(root)


def start(target, *args) -> int:
    child = os.fork()
    if child == 0:
        try:
            target(*args)
        finally:
            os._exit(1)  # nobody returns but by an error
    return child


def main(root: Path, seed: int, num_kills: int, num_producers: int) -> None:
    rng = random.Random(seed)
    (root / "acknowledged").mkdir(parents=True)
    producers = {f"p{k}": start(produce, root, f"p{k}", 0) for k in range(num_producers)}
    ingester = start(keep_ingesting, root)
    killed = {"producer": 0, "ingester": 0}
    try:
        for kill in range(1, num_kills + 1):
            time.sleep(rng.uniform(0.0, 0.5))
            name = rng.choice(sorted(producers))
            reap(producers[name])
            producers[name] = start(produce, root, name, kill * 1_000_000)
            killed["producer"] += 1
            time.sleep(rng.uniform(0.0, 0.5))
            reap(ingester)
            ingester = start(keep_ingesting, root)
            killed["ingester"] += 1
    finally:
        # A failure must not leave them writing for ever.
        for child in (*producers.values(), ingester):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    for child in (*producers.values(), ingester):
        os.waitpid(child, 0)
    print(json.dumps(killed))


def reap(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    # One that had ended by itself has failed: its traceback is on stderr.
    assert os.WIFSIGNALED(status), f"a child ended with {status} before it was killed"


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

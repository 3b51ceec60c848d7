"""Peers by their own packages: samplers of torch and transformers, FlatFlow; and why Galvatron is not among them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from dflop.records import ModuleSpec
from dflop.schedule.items import Ints

CLIENTS = Path(__file__).parents[3] / ".venv" / "clients"
FLATFLOW, GALVATRON = CLIENTS / "flatflow", CLIENTS / "galvatron"
HOW = "make rivals"


def random_order(num_samples: int, seed: int) -> Ints:
    """torch's RandomSampler."""
    import torch
    from torch.utils.data import RandomSampler

    sampler = RandomSampler(range(num_samples), generator=torch.Generator().manual_seed(seed))
    return np.array(list(sampler), dtype=np.int64)


def length_grouped_order(num_tokens: Ints, samples_per_rank: int, seed: int) -> Ints:
    """transformers' LengthGroupedSampler; it groups what one device gets in one optimizer step."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    sampler = LengthGroupedSampler(
        samples_per_rank, lengths=num_tokens.tolist(), generator=torch.Generator().manual_seed(seed)
    )
    return np.array(list(sampler), dtype=np.int64)


def batch_rebalance(num_tokens: Ints, num_slots: int, num_ranks: int) -> tuple[Ints, Ints]:
    """(slot, rank) by transformers' BatchRebalanceSampler, the global batch kept.

    Raises:
        ValueError: fewer samples than buckets.
    """
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    if len(num_tokens) < num_slots * num_ranks:
        raise ValueError(f"{len(num_tokens)} samples for {num_slots * num_ranks} buckets")
    slot, rank = (np.zeros(len(num_tokens), dtype=np.int64) for _ in range(2))
    sampler = BatchRebalanceSampler(
        num_tokens.tolist(), len(num_tokens), num_ranks, num_slots, shuffle=False, drop_last=True
    )
    # Every rank works all of it out again; asking one for all ranks' shares is what they have in common.
    pairs = list(range(len(num_tokens)))
    for r, microbatches in enumerate(sampler._assign(pairs, num_tokens.tolist())):
        for k, members in enumerate(microbatches):
            slot[members], rank[members] = k, r
    return slot, rank


class FlatFlow:
    """Its package in a process of its own, which ends with the `with` block.

    Args:
        llm: Language model whose arithmetic weighs the samples.

    Raises:
        RuntimeError: it is not installed, or does not start.
    """

    def __init__(self, llm: ModuleSpec) -> None:
        if not FLATFLOW.is_dir():
            raise RuntimeError(f"not installed in {FLATFLOW.relative_to(CLIENTS.parents[1])} ({HOW})")
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("flatflow_client.py"))],
            env=os.environ | {"PYTHONPATH": str(FLATFLOW)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        started = self._ask(_decoder_of(llm))
        self.version, self.graph_s = str(started["version"]), float(started["graph_s"])

    def __enter__(self) -> FlatFlow:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()

    def orders(
        self, num_tokens: Sequence[Ints], *, global_batch_size: int, num_slots: int, num_ranks: int, tp: int,
        is_stable: bool = True,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Per call orders `[ranks][samples]` and seconds, or an `error`: what the package, or its rule of counts, says.

        Args:
            num_tokens: Of each call's samples: a global batch, or an epoch of them.
            global_batch_size: Samples of a step.
            num_slots: Microbatches of a step.
            num_ranks: Data-parallel.
            tp: Tensor-parallel ranks.
            is_stable: Whether samples stay in their global batch.
        """
        each, rest = divmod(global_batch_size, num_slots * num_ranks)
        if rest:
            told = f"{global_batch_size} samples are not equally many in {num_slots} microbatches of {num_ranks} ranks"
            return [{"error": told} for _ in num_tokens]
        calls = [
            {
                "sizes": tokens.tolist(), "tp": tp, "num_ranks": num_ranks, "global_batch_size": global_batch_size,
                "micro_batch_size": each, "is_stable": is_stable,
            }
            for tokens in num_tokens
        ]  # fmt: skip
        found: list[dict[str, Any]] = self._ask(calls)
        return found

    def _ask(self, question: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines() or ["no words"]
            raise RuntimeError(f"ended: {said[-1]}")
        return json.loads(line)


def galvatron_import() -> str:
    """What importing its search engine ends with; empty: it can be imported."""
    if not GALVATRON.is_dir():
        return f"not installed in {GALVATRON.relative_to(CLIENTS.parents[1])} ({HOW})"
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import galvatron.core.search_engine"],
        env=os.environ | {"PYTHONPATH": str(GALVATRON)},
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no words"])[-1]


def package(name: str) -> str:
    """`name version`, as rows name what they ran."""
    try:
        return f"package {name} {version(name)}"
    except PackageNotFoundError:
        return f"package {name}"


def is_importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _decoder_of(llm: ModuleSpec) -> dict[str, int]:
    """Dimensions that a spec says or implies."""
    h = llm.hidden_size
    kv_params = 2 * h * (h // llm.num_heads) * llm.num_kv_heads
    return {
        "hidden": h, "heads": llm.num_heads, "kv_heads": llm.num_kv_heads, "layers": llm.num_layers,
        "intermediate": (llm.num_layer_params - 2 * h * h - kv_params) // (3 * h),
        "vocab": llm.num_edge_params // (2 * h),
    }  # fmt: skip

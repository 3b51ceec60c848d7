"""Configurations of trainers that pack samples, held to their keys: `trainer_keys.json`, read from their classes."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.emit.packing_trainers import emit_ms_swift, emit_torchtitan, emit_veomni
from dflop.records import LLM, ModulePlan, ParallelSpec, Plan
from tests.emit.mimo_text import parsed
from tests.emit.plans import CLUSTER, split

KEYS = json.loads((Path(__file__).parent / "trainer_keys.json").read_text())
KINDS = {"int": int, "bool": bool, "float": (int, float), "str": str}


@st.composite
def packed_plans(draw, tp: int = 1) -> Plan:
    """Of 16 ranks; what `trainer_plan` makes."""
    cp = draw(st.sampled_from([1, 2, 4, 8] if tp == 1 else [1]))
    num_replicas = 16 // tp
    shards = draw(st.sampled_from([n for n in (2, 4, 8, 16) if n % cp == 0 and n <= num_replicas]))
    again = (2,) if draw(st.booleans()) else ()
    parallel = ParallelSpec(tp, 1, num_replicas // cp, cp=cp, ep=draw(st.sampled_from([1, 2, 4])))
    how = {"layers_per_stage": (2,), "parameter_shards": shards, "recomputed": again, "stage_memory_bytes": (1,)}
    modules = [ModulePlan(name, parallel, 0, max_tokens=size, **how) for name, size in (("vision", 0), (LLM, 9000))]
    plan = split(modules[1], num_microbatches=draw(st.integers(1, 8)))
    return dataclasses.replace(plan, modules=tuple(modules))


def options(script: str, tmp_path: Path, program: str) -> list[str]:
    """What the program is called with on the second node."""
    (tmp_path / program).write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    (tmp_path / program).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NODE_RANK": "1", "MASTER_ADDR": "host0"}
    done = subprocess.run(["bash", "-c", script, "x.sh", "--more", "y"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def as_dict(words: list[str]) -> dict[str, str]:
    return {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}


def flat(tree: dict, prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def takes(kind: str, value: object) -> bool:
    """Whether a field of such a type takes the value."""
    if kind.startswith("Literal["):
        return value in json.loads(kind.removeprefix("Literal"))
    kind = kind.removeprefix("Optional[").removesuffix("]")
    return isinstance(value, KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))


@given(packed_plans())
def test_veomni_has_the_keys_and_its_degrees_make_up_the_world(plan):
    document = parsed(emit_veomni(plan, CLUSTER))
    for key, value in flat(document).items():
        assert takes(KEYS["veomni"]["keys"][key], value), (key, value)
    train, llm = document["train"], plan.module(LLM)
    degrees = train["accelerator"]
    dp_size = plan.num_processes // degrees["ulysses_size"]
    assert degrees["dp_replicate_size"] * degrees["dp_shard_size"] == dp_size
    assert train["global_batch_size"] == plan.num_microbatches * train["micro_batch_size"] * dp_size
    # VeOmni shards over replicas and the ranks of a Ulysses group together.
    assert degrees["dp_shard_size"] * degrees["ulysses_size"] == llm.parameter_shards
    assert train["gradient_checkpointing"]["enable"] == bool(llm.recomputed)


@given(packed_plans() | packed_plans(tp=2))
def test_torchtitans_degrees_make_up_the_world(plan):
    script = emit_torchtitan(plan, CLUSTER)
    words = script.split("torchtitan.train", 1)[1].replace("\\\n", "").split()[1:]
    given, last = as_dict(words[:-1]), words[-1]
    assert given.keys() <= KEYS["torchtitan"]["keys"].keys()
    names = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree")
    replicas, shards, tp = (int(given[f"parallelism.{name}"]) for name in names)
    assert replicas * shards * tp == plan.num_processes
    assert last == f"activation_checkpoint:{'full' if plan.module(LLM).recomputed else 'none'}"


def test_ms_swifts_script_passes_its_arguments_on(tmp_path):
    parallel = ParallelSpec(1, 1, 2, cp=8)
    llm = ModulePlan(LLM, parallel, 0, (2,), stage_memory_bytes=(1,), parameter_shards=16, max_tokens=9000)
    words = options(emit_ms_swift(split(llm), CLUSTER), tmp_path, "swift")
    assert words[0] == "sft"
    given = as_dict(words[1:])
    assert given.pop("more") == "y"
    assert given.keys() <= KEYS["ms-swift"]["keys"].keys()
    assert given["tuner_type"] == "full", "the plan has room for all weights"
    assert (given["sequence_parallel_size"], given["packing_length"], given["gradient_accumulation_steps"]) == (
        "8",
        "9000",
        "2",
    )
    assert json.loads(given["fsdp"])["fsdp_config"]["activation_checkpointing"] is False


@pytest.mark.parametrize("emit", [emit_ms_swift, emit_torchtitan, emit_veomni])
def test_what_cannot_be_said_stands_in_the_comments(emit):
    parallel = ParallelSpec(1, 1, 16)
    llm = ModulePlan(LLM, parallel, 0, (2,), stage_memory_bytes=(1,), parameter_shards=16, max_tokens=9000)
    comments = "".join(line for line in emit(split(llm), CLUSTER).splitlines(keepends=True) if line.startswith("#"))
    assert "16 GPUs, FSDP2." in comments
    assert "32 packs of up to 9000 tokens, about 16 samples" in comments
    assert "balanced by cost" in comments


def test_torchtitans_script_starts_its_trainer_on_every_node(tmp_path):
    parallel = ParallelSpec(1, 1, 16)
    llm = ModulePlan(LLM, parallel, 0, (2,), stage_memory_bytes=(1,), parameter_shards=16, max_tokens=9000)
    words = options(emit_torchtitan(split(llm), CLUSTER), tmp_path, "torchrun")
    assert words[:4] == ["--nnodes=2", "--nproc-per-node=8", "--node-rank=1", "--master-addr=host0"]
    assert words[5:9] == ["-m", "torchtitan.train", "--more", "y"]

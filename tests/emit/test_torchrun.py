import dataclasses
import os
import re
import subprocess

import pytest
from hypothesis import given, settings

from dflop.emit.torchrun import emit_torchrun
from dflop.errors import ConfigError
from dflop.parallel.topology import seats
from dflop.records import LLM, ClusterSpec, Plan
from tests.emit.plans import CLUSTER, inline_plans, module, split, split_plans

TWELVE = split(module("vision", 1, 1, 4), module(LLM, 2, 2, 2, layers_per_stage=(3, 5)))


def cluster_of(plan: Plan, per_node: int, device: str = "cuda") -> ClusterSpec:
    return dataclasses.replace(
        CLUSTER, num_nodes=-(-plan.num_processes // per_node), num_processes_per_node=per_node, device=device
    )


def table(script: str) -> list[list[str]]:
    """The rows of the rank table, without its header."""
    found = [line[2:].split(maxsplit=7) for line in script.splitlines() if re.match(r"# +\d+ +\d+ ", line)]
    assert "rank  node  local" in script
    return found


def start(script: str, tmp_path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the script beside a `torchrun` that prints its arguments and threads."""
    stub = tmp_path / "torchrun"
    stub.write_text('#!/bin/bash\nprintf "%s\\n" "$@" "threads=$OMP_NUM_THREADS"\n')
    stub.chmod(0o755)
    (tmp_path / "start.sh").write_text(script)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "SLURM_", "MASTER_", "NODE_RANK"))}
    clean |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | env
    return subprocess.run(["bash", tmp_path / "start.sh", *args], capture_output=True, text=True, env=clean)


@settings(max_examples=40)
@given(split_plans() | inline_plans())
def test_the_table_is_the_engines_seats(plan):
    rows = table(emit_torchrun(plan, cluster_of(plan, 8)))
    assert [tuple(map(int, row[:7])) for row in rows] == [
        (s.rank, s.rank // 8, s.rank % 8, s.stage, s.dp_rank, s.cp_rank, s.tp_rank) for s in seats(plan)
    ]
    assert [row[7] for row in rows] == [
        " ".join(f"{p.module}[{p.layers[0]}:{p.layers[1]}]" for p in s.parts) for s in seats(plan)
    ]


@pytest.mark.parametrize(("node", "processes"), [("0", "8"), ("1", "4")])
@pytest.mark.parametrize("variable", ["NODE_RANK", "SLURM_NODEID"])
def test_a_node_starts_its_processes(tmp_path, node, processes, variable):
    done = start(
        emit_torchrun(TWELVE, CLUSTER), tmp_path, "runs/a b", "compare", MASTER_ADDR="host0", **{variable: node}
    )
    assert done.stdout.split("\n")[:-1] == [
        "--nnodes=2", f"--node-rank={node}", f"--nproc-per-node={processes}", "--master-addr=host0",
        "--master-port=29500", "-m", "dflop.jobs.train", "runs/a b", "compare", "threads=8",
    ], done.stderr  # fmt: skip


def test_one_node_needs_no_address(tmp_path):
    script = emit_torchrun(TWELVE, cluster_of(TWELVE, 12, "cpu"))
    lines = start(script, tmp_path, "run", MASTER_PORT="1234").stdout.split()
    assert {"--nnodes=1", "--nproc-per-node=12", "--master-addr=127.0.0.1", "--master-port=1234"} < set(lines)
    assert lines[-2:] == ["train", "threads=1"]


def test_a_node_beyond_the_plan_does_nothing(tmp_path):
    done = start(emit_torchrun(TWELVE, CLUSTER), tmp_path, "run", MASTER_ADDR="host0", NODE_RANK="2")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("args", "env"), [((), {"NODE_RANK": "0", "MASTER_ADDR": "h"}), (("r",), {"NODE_RANK": "0"}), (("r",), {})]
)
def test_what_is_missing_is_said(tmp_path, args, env):
    done = start(emit_torchrun(TWELVE, CLUSTER), tmp_path, *args, **env)
    assert done.returncode != 0
    assert "usage:" in done.stderr
    assert done.stdout == ""


def test_a_line_break_in_a_name_stays_in_the_comment(tmp_path):
    script = emit_torchrun(dataclasses.replace(TWELVE, run_id="a\ntouch evil"), CLUSTER)
    start(script.replace("RUN_DIR", "R"), tmp_path, "run", NODE_RANK="5")
    assert "of run a touch evil:" in script
    assert "\ntouch" not in script


def test_a_cluster_that_is_too_small_is_refused():
    with pytest.raises(ConfigError, match="12 processes, cluster `test` has 8"):
        emit_torchrun(TWELVE, dataclasses.replace(CLUSTER, num_nodes=1))

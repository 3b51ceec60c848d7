"""Lightning's own launcher and torchrun, with a sampler that was made before they said who is which rank.

As a program, `python -m tests.sampler.test_launchers FOLDER [NUM_NODES]`, this is the Lightning example of
docs/sampler.md for any launcher: every rank leaves the samples that it trained.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from dflop.sampler import BalancedBatchSampler, sample_costs
from tests.sampler.tiny import remembering_module

ROOT = Path(__file__).parents[2]
LENGTHS = [(7 * i) % 41 + 3 for i in range(32)]
NUM_RANKS = 2
PROGRAM = ["-m", "tests.sampler.test_launchers"]
OWN = [sys.executable, *PROGRAM]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}", *PROGRAM]


def main(folder: str, num_nodes: str = "1") -> None:
    sampler = BalancedBatchSampler(sample_costs(LENGTHS), global_batch_size=8, num_microbatches=2)
    loader = DataLoader(range(len(LENGTHS)), batch_sampler=sampler, collate_fn=list)
    import pytorch_lightning as pl  # seconds of every collection

    warnings.simplefilter("ignore")
    module = remembering_module()
    pl.Trainer(
        accelerator="cpu", devices=NUM_RANKS // int(num_nodes), num_nodes=int(num_nodes), strategy="ddp", max_epochs=1,
        accumulate_grad_batches=2, use_distributed_sampler=False, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, loader)  # fmt: skip
    seen = [i for batch in module.seen for i in batch]
    (Path(folder) / f"seen-{module.global_rank}.json").write_text(json.dumps(seen))


def assert_every_sample_once(folder: Path) -> None:
    files = [folder / f"seen-{rank}.json" for rank in range(NUM_RANKS)]
    assert sorted(i for file in files for i in json.loads(file.read_text())) == list(range(len(LENGTHS)))


@pytest.mark.lane("jobs")
@pytest.mark.parametrize("launcher", [OWN, TORCHRUN], ids=["its own", "torchrun"])
def test_every_sample_is_trained_once(launcher, tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        [*launcher, str(tmp_path)], cwd=ROOT, env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert_every_sample_once(tmp_path)


if __name__ == "__main__":
    main(*sys.argv[1:])

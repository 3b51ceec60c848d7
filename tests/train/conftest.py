from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from dflop.train.wire import Store, open_store


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A world of one, in the test's own process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous-one", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def store() -> Store:
    """A key-value store as rank 0 serves it."""
    return open_store("127.0.0.1", 0, is_server=True, timeout_s=20)

"""The blocks of docs/balance.md run as they stand."""

from pathlib import Path

import torch

from tests.balance.tiny import make_model, sample
from tests.test_documents import FENCED

PAGE = Path(__file__).parents[2] / "docs" / "balance.md"


def test_blocks_of_the_page_run():
    model, updated = make_model("qwen3_vl"), []
    samples = [sample("qwen3_vl", model, n, [1], []) for n in range(2)]
    given = {
        "lengths": [100 * n for n in range(1, 60)], "update": updated.append, "model": model,
        "loader": samples, "samples": samples, "collate": lambda batch: batch[0],
        "optimizer": torch.optim.SGD(model.parameters(), 0.01),
    }  # fmt: skip
    before = model.lm_head.weight.clone()
    blocks = [block.removeprefix("```python\n").removesuffix("```") for block in FENCED.findall(PAGE.read_text())]
    for block in blocks:
        exec(block, given)
    assert sum(map(len, updated)) > 0
    assert not torch.equal(model.lm_head.weight, before)

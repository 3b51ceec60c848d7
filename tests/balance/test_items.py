"""An encoder of one's own: rows come back in order, uneven and empty ranks included, and what cannot be is refused."""

from pathlib import Path

import pytest
import torch

from dflop.balance import ItemDealer, Items, balanced_encoder, table_cost
from dflop.balance.items import DealtItems
from dflop.errors import ConfigError, TrainError
from tests.train.ranks import run_ranks

SIZES = ([7, 1, 3], [], [2])


def items_of(rank: int, width: int = 2) -> Items | None:
    """Each item's parts hold 100 times its rank, its number and the part's."""
    if not (sizes := SIZES[rank]):
        return None
    parts = [torch.arange(n)[:, None] + 100.0 * rank + 10 * number for number, n in enumerate(sizes)]
    return Items(torch.cat(parts).repeat(1, width), sizes, [(n,) for n in sizes], [float(n) for n in sizes])


def refusal(dealer: ItemDealer, items: dict[str, Items | None]) -> str:
    try:
        dealer.meet(items)
    except TrainError as error:
        return str(error)
    return ""


def exchange(rank: int, folder: Path) -> tuple[DealtItems, list[int], list[torch.Tensor], torch.Tensor, list[str]]:
    """Rows are twice the item's parts, the first of them twice over."""
    dealer, weight = ItemDealer(), torch.tensor(2.0, requires_grad=True)
    dealt = dealer.meet({"audio": items_of(rank), "nobody's": None})
    encoded: list[int] = []

    def encode(data: torch.Tensor, sizes: list[tuple[int, ...]]) -> list[torch.Tensor]:
        encoded.extend(n for (n,) in sizes)
        return [weight * torch.cat([of[:1], of]) for of in data.split([n for (n,) in sizes])]

    rows = dealer.encode(dealt["audio"], items_of(rank), encode, torch.device("cpu"))
    torch.stack([(rank + 1) * of.sum() for of in rows]).sum().backward()
    refused = [refusal(dealer, {"audio": items_of(rank, 2 + rank)}), refusal(dealer, {f"audio-{rank}": None})]
    dealer.close()
    assert weight.grad is not None
    return dealt["audio"], encoded, rows, weight.grad, refused


def test_rows_come_back_to_where_they_belong_and_gradients_to_who_encoded(tmp_path):
    found = run_ranks(exchange, 3, tmp_path)

    every = [n for _, encoded, *_ in found for n in encoded]
    assert sorted(every) == [1, 2, 3, 7]
    total = 0.0
    for rank, (dealt, _, rows, _, refused) in enumerate(found):
        assert dealt.encoder.tolist() == found[0][0].encoder.tolist()
        own = items_of(rank)
        if own is None:
            assert [of.shape for of in rows] == [(0, 2)]
        else:
            for of, parts in zip(rows, own.data.split(own.num_parts), strict=True):
                expected = 2 * torch.cat([parts[:1], parts])
                assert torch.equal(of, expected)
                total += (rank + 1) * float(expected.sum()) / 2
        assert "shapes [(2,), (4,)]" in refused[0]
        assert "ranks deal items of [['audio-0'], ['audio-1'], ['audio-2']]" in refused[1]
    assert sum(float(grad) for *_, grad, _ in found) == pytest.approx(total)


def test_one_rank_has_nothing_to_deal_and_a_model_without_images_is_refused():
    from tests.balance.tiny import make_model
    from tests.sampler.tiny import make_model as make_llama

    model = make_model("llava")
    with balanced_encoder(model) as dealer:
        assert dealer is None
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no `get_image_features`"):
        balanced_encoder(make_llama()).__enter__()


def test_costs_of_a_table_are_its_seconds(tmp_path):
    from dflop.cost.analytic import analytic_cost_tables
    from dflop.cost.devices import find_device
    from tests.models.tiny_families import CASES

    tables = analytic_cost_tables(CASES["Qwen3-VL"].family.specs(), find_device("h100"), profile_key="")
    cost = table_cost(tables)
    assert cost((2, 8, 8)) > cost((1, 8, 8)) > 0
    assert cost((1, 8, 16)) > cost((2, 8, 8)), "frames attend to themselves"
    with pytest.raises(ConfigError, match="no list of cost tables"):
        table_cost(tmp_path / "missing.json")

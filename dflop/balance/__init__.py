"""Work of one step dealt over ranks by cost, for trainers of any kind: a function, an exchange, a context manager.

`deal` deals samples or rollouts by their lengths, with numpy alone. `ItemDealer` deals encoder items of a global batch
over the ranks of a process group and returns their rows, exact in the gradient; `balanced_encoder` puts that round a
model of transformers, and `Packing` lets it compute packed samples each by itself. Names are imported when they are
used: `deal` needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflop.balance.items import ItemDealer, Items
    from dflop.balance.media_costs import patches, table_cost
    from dflop.balance.model_hook import balanced_encoder
    from dflop.balance.packing import Packing, PackingCollator
    from dflop.balance.samples import deal

_MODULES = {
    "balanced_encoder": "model_hook", "deal": "samples", "ItemDealer": "items", "Items": "items",
    "Packing": "packing", "PackingCollator": "packing", "patches": "media_costs", "table_cost": "media_costs",
}  # fmt: skip
__all__ = ["ItemDealer", "Items", "Packing", "PackingCollator", "balanced_encoder", "deal", "patches", "table_cost"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module `dflop.balance` has no `{name}`")
    return getattr(importlib.import_module(f"dflop.balance.{_MODULES[name]}"), name)

"""FlatFlow by its own package: a line of JSON in, a line of JSON out.

The first line describes the language model, every further one is a call. Answered are the version and then the order of
every rank. FlatFlow weighs samples by the arithmetic of a traced graph of the language model, and wants equal counts of
samples in all microbatches. The graph is a decoder of the model's dimensions, traced by torch without memory.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import numpy as np
import torch
from flatflow import ffi
from flatflow.ops import serialize
from torch.fx.experimental.proxy_tensor import make_fx


def decoder_graph(hidden: int, heads: int, kv_heads: int, intermediate: int, layers: int, vocab: int) -> Any:
    """A decoder with grouped attention and a gated MLP, over a symbolic number of tokens."""
    each = hidden // heads

    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="meta")

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight(hidden)

    def run(ids: torch.Tensor) -> torch.Tensor:
        x, num = torch.nn.functional.embedding(ids, weight(vocab, hidden)), ids.shape[0]

        def kv(y: torch.Tensor) -> torch.Tensor:
            z = (y @ weight(hidden, kv_heads * each)).view(num, kv_heads, each).transpose(0, 1)
            return z.unsqueeze(1).expand(kv_heads, heads // kv_heads, num, each).reshape(heads, num, each)

        for _ in range(layers):
            y = norm(x)
            query = (y @ weight(hidden, hidden)).view(num, heads, each).transpose(0, 1)
            scores = torch.softmax(torch.bmm(query, kv(y).transpose(1, 2)) * each**-0.5, -1)
            x = x + torch.bmm(scores, kv(y)).transpose(0, 1).reshape(num, hidden) @ weight(hidden, hidden)
            y = norm(x)
            gated = torch.nn.functional.silu(y @ weight(hidden, intermediate)) * (y @ weight(hidden, intermediate))
            x = x + gated @ weight(intermediate, hidden)
        return norm(x) @ weight(hidden, vocab)

    return make_fx(run, tracing_mode="symbolic")(torch.zeros(128, dtype=torch.int64, device="meta")).graph


def schedule(buffer: bytes, call: dict[str, Any]) -> dict[str, Any]:
    """Orders of all ranks, or what the package said."""
    sizes = np.array(call["sizes"], dtype=np.int64)
    function = ffi.sched if call["is_stable"] else ffi.sched_unstable
    try:
        orders = [
            function(
                np.arange(len(sizes), dtype=np.uintp), sizes, buffer, call["tp"], 1, call["num_ranks"], rank,
                call["global_batch_size"], call["micro_batch_size"], "joint",
            ).tolist()
            for rank in range(call["num_ranks"])
        ]  # fmt: skip
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return {"error": f"{type(error).__name__}: {error}"}
    return {"orders": orders}


def main() -> None:
    decoder = json.loads(sys.stdin.readline())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # making a weight has no arithmetic, and is no operator it knows
        buffer = serialize(decoder_graph(**decoder))
    print(json.dumps({"version": ffi.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(schedule(buffer, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

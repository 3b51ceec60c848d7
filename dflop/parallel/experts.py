"""Expert parallelism: neighbouring replicas keep a part of every layer's experts each, and send each other tokens.

A token goes to the ranks of its experts and comes back weighted and summed (Lepikhin et al., arXiv 2006.16668, section
2). Per layer and pass there are two all-to-alls of as many rows as tokens times experts of a token, in the type of the
hidden states, and one of their numbers, for which the host waits; recomputed layers exchange forward twice. What an
expert computes is transformers' own function, given rows that are routed to one expert each.

An expert's gradient is the sum over all tokens of the group, so it needs no sum over the group. All ranks must run the
same layers in the same microbatches and let the same ones run again: `feed.py` sees to both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dflop.errors import ConfigError
from dflop.models.build import Stage
from dflop.models.generic.experts import experts_of
from dflop.parallel.exchange import all_to_all, message_device
from dflop.parallel.part import Part, even_part
from dflop.parallel.tensor import Replaced, keep_part, rename


def share_experts(stage: Stage, group: dist.ProcessGroup) -> dict[str, Part]:
    """Keep this rank's experts of a stage, whose every forward and backward is collective from then on.

    Args:
        stage: Changed in place; `stage.names` then holds the parts under their global names.
        group: Ranks that keep the other experts, in the order of the experts.

    Returns:
        Which experts this rank holds, by global name of the parameter.

    Raises:
        ConfigError: the ranks cannot share the experts of a layer evenly; the stage is unchanged.
    """
    found = [experts for layer in stage.layers for experts in experts_of(layer)]
    for experts in found:
        if experts.num_experts % group.size():
            raise ConfigError(
                f"{experts.num_experts} experts of {type(experts).__name__} over {group.size()} ranks",
                where="plan", hint="`ep` must divide the experts of every layer",
            )  # fmt: skip
    replaced: Replaced = {}
    for experts in found:
        for name, whole in list(experts.named_parameters()):
            part = even_part(whole.shape, 0, 1, group.rank(), group.size())
            replaced |= keep_part(experts, name, part)
        experts.num_experts //= group.size()
        experts.forward = functools.partial(_dispatched, experts.forward, experts, group)
    parts = rename(stage, replaced)
    stage.of_experts = frozenset(parts)
    return parts


def _dispatched(
    run: Callable[..., torch.Tensor], experts: Any, group: dist.ProcessGroup, hidden_states: torch.Tensor,
    top_k_index: torch.Tensor, top_k_weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """What all experts of the group make of this rank's tokens, weighted and summed: `[tokens, hidden]`."""
    each, (num_tokens, num_active) = experts.num_experts, top_k_index.shape
    chosen = top_k_index.reshape(-1)
    order = chosen.argsort(stable=True)
    sent = torch.zeros(group.size() * each, dtype=torch.int64, device=chosen.device)
    sent = sent.scatter_add_(0, chosen, torch.ones_like(chosen)).view(group.size(), each)
    received = _swapped(sent, group)
    to, come = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    rows = all_to_all(hidden_states.index_select(0, order // num_active), to, come, group)
    number = torch.arange(each, device=chosen.device).repeat(group.size())
    made = _made(run, experts, rows, number.repeat_interleave(received.flatten(), output_size=len(rows)))
    back = all_to_all(made, come, to, group).index_select(0, order.argsort())
    weighted = back.view(num_tokens, num_active, -1) * top_k_weights.unsqueeze(-1)
    return weighted.sum(1).to(hidden_states.dtype)


def _made(
    run: Callable[..., torch.Tensor], experts: nn.Module, rows: torch.Tensor, number: torch.Tensor
) -> torch.Tensor:
    """What experts make of a row each."""
    if len(rows):
        return run(rows, number[:, None], rows.new_ones(len(rows), 1))
    # Gradients go on to the other ranks, and are zeros here, so that replicas can sum them.
    return rows + torch.stack([p.flatten()[0] for p in experts.parameters()]).sum() * 0


def _swapped(sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """How many rows of each rank come to each expert here: `[ranks, experts]`, as `sent` is of those that go."""
    given = sent.to(message_device(sent.device, group))
    found = torch.empty_like(given)
    dist.all_to_all_single(found, given, group=group)
    return found.to(sent.device)

"""Tensor parallelism of a stage, after Megatron-LM (arXiv 1909.08053, section 3), for Hugging Face's own modules.

Every rank of the group gets the same input and computes the same output, but holds only its part of the matrices that
a `TensorSplit` names. All other parameters are whole on every rank. Between attentions and MLPs the ranks share the
tokens (`tokens.py`). Per layer of attention and MLP and per microbatch they exchange, each time the hidden states
`[tokens, hidden]` in their own type:

- forward: 2 all-gathers in front of column-split Linears, one for query, key and value together and one for gate and
  up, and 2 reduce-scatters behind the row-split ones;
- backward: the same the other way round, and the 2 all-gathers once more.

Recomputed layers run what they exchange forward again. Dropout is equal on all ranks only if their random states are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dflop.models.autograd import opaque
from dflop.models.build import EncoderStage, Stage
from dflop.models.generic.llm_stage import LlmStage
from dflop.models.loss import HeadLoss, head_loss
from dflop.models.low_rank import INPUT_SHARE, is_adapted, move_adapter, plus_adapter
from dflop.models.splits import cannot_split, check_split, entrances, holder_of, split_of
from dflop.parallel.exchange import all_reduce, exchanged, sum_backward
from dflop.parallel.part import Part, even_part
from dflop.parallel.tokens import (
    TowerTokens,
    Whole,
    enter,
    leave,
    num_shared,
    packed_tokens,
    share_tokens,
    sum_and_share,
)

Replaced = dict[nn.Parameter, tuple[nn.Parameter, Part]]
"""Whole parameter -> what this rank holds of it."""


def shard_stage(stage: Stage, group: dist.ProcessGroup) -> dict[str, Part]:
    """Keep this rank's part of a stage, whose every forward and backward is collective from then on.

    The first LLM stage keeps its rows of the embedding: 1 all-reduce forward, of the hidden states. The last one keeps
    its rows of the head and computes the loss from them: 2 all-reduces forward, of 3 float32 numbers per token, and 1
    backward, of the hidden states. A tied head has the rows of the embedding.

    Args:
        stage: Changed in place; `stage.names` then holds the parts under their global names.
        group: Ranks that hold the parts of this stage, in the order of the parts.

    Returns:
        Which parts this rank holds, by global name; parameters not named are whole and equal on all ranks.

    Raises:
        ConfigError: as `split_of` and `shard_layers`, or a vocabulary smaller than the group; the stage is unchanged.
    """
    if group.size() == 1:
        return {}
    head = stage.head if isinstance(stage, LlmStage) else None
    embedding: Any = stage.decoder.embed_tokens if isinstance(stage, LlmStage) and stage.is_first else None
    for matrix in (embedding, head):
        if matrix is not None and len(matrix.weight) < group.size():
            raise cannot_split(f"a vocabulary of {len(matrix.weight)}", group.size())
    layers, tower = stage.layers, TowerTokens(group)
    whole_of = tower.whole if isinstance(stage, EncoderStage) else packed_tokens
    replaced = shard_layers(layers, group, whole_of)
    partial = {p for layer in layers for p in layer.parameters()}
    if isinstance(stage, EncoderStage):
        for number in stage.taken_states:
            if number < len(layers):
                tower.enter(layers[number])
            if number:
                tower.leave(layers[number - 1])
    if isinstance(stage, LlmStage):
        partial |= set(stage.decoder.norm.parameters())
        stage.num_rows = functools.partial(num_shared, num_ranks=group.size())
        stage.enter, stage.leave = functools.partial(enter, group=group), functools.partial(leave, group=group)
        if embedding is not None:
            replaced |= shard_embedding(embedding, group)
        if head is not None:
            stage.head_loss = shard_head(head, replaced, group)
    stage.partial = frozenset(name for name, p in stage.names.items() if p in partial)
    return rename(stage, replaced)


def rename(stage: Stage, replaced: Replaced) -> dict[str, Part]:
    """Give what took the place of whole parameters their names in `stage.names`; which part each is, by name."""
    held = {name: replaced[p] for name, p in stage.names.items() if p in replaced}
    stage.names |= {name: kept for name, (kept, _) in held.items()}
    return {name: part for name, (_, part) in held.items()}


def shard_layers(layers: Iterable[nn.Module], group: dist.ProcessGroup, whole_of: Whole) -> Replaced:
    """Cut the Linears that `split_of` names in every layer, in place.

    Args:
        layers: Nothing is changed unless all of them can be cut.
        group: Ranks that hold the parts, in the order of the parts.
        whole_of: Tokens of all ranks as a layer takes them.

    Returns:
        What took the place of what, and which part of it that is.

    Raises:
        ConfigError: as `split_of`, or a layer has heads or a width that the ranks cannot share.
    """
    rank, degree = group.rank(), group.size()
    replaced: Replaced = {}
    splits = [(layer, split_of(layer)) for layer in layers]
    for layer, split in splits:
        check_split(layer, split, degree)
    for layer, split in splits:
        for name in split.heads:
            holder, attribute = holder_of(layer, name)
            setattr(holder, attribute, getattr(holder, attribute) // degree)
        for name in split.column:
            column: Any = layer.get_submodule(name)
            for kind in ("weight", "bias"):
                if (whole := getattr(column, kind)) is not None:
                    part = even_part(whole.shape, 0, split.fused.get(name, 1), rank, degree)
                    replaced |= keep_part(column, kind, part)
            if is_adapted(column):  # A is whole, its gradient a sum over the ranks
                shape = column.lora_B.weight.shape
                replaced |= keep_part(
                    column.lora_B, "weight", even_part(shape, 0, split.fused.get(name, 1), rank, degree)
                )
            column.out_features //= degree
        for name in split.row:
            holder, attribute = holder_of(layer, name)
            row = getattr(holder, attribute)
            replaced |= keep_part(row, "weight", even_part(row.weight.shape, 1, 1, rank, degree))
            setattr(holder, attribute, made := RowSplitLinear(row.weight, row.bias, group))
            if is_adapted(row):  # B is whole, what it is given is summed with the rest
                shape = row.lora_A.weight.shape
                replaced |= keep_part(row.lora_A, "weight", even_part(shape, 1, 1, rank, degree))
                move_adapter(row, made)
                setattr(made, INPUT_SHARE, rank)
        for module in entrances(layer, split):
            share_tokens(module, group, whole_of)
    return replaced


def vocab_share(vocab_size: int, rank: int, degree: int) -> tuple[int, int]:
    """Rows `[first, end)` of the vocabulary that belong to `rank`: evenly, the first ranks take one more if need be."""
    each, more = divmod(vocab_size, degree)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


def keep_part(linear: nn.Module, kind: str, part: Part) -> Replaced:
    """Replace the weight or bias of a Linear by a part of it."""
    whole = getattr(linear, kind)
    kept = nn.Parameter(part.of(whole.detach()), requires_grad=whole.requires_grad)
    setattr(linear, kind, kept)
    return {whole: (kept, part)}


def shard_embedding(embedding: Any, group: dist.ProcessGroup) -> Replaced:
    """Keep this rank's rows of an embedding. Tokens of other ranks' rows are zeros, until the ranks sum.

    Args:
        embedding: Changed in place.
        group: Ranks that hold the other rows; at most as many as the vocabulary has entries.
    """
    num_rows, padding, look_up = len(embedding.weight), embedding.padding_idx, embedding.forward
    first, end = vocab_share(num_rows, group.rank(), group.size())
    replaced = keep_part(embedding, "weight", Part(tuple(embedding.weight.shape), 0, ((first, end),)))
    embedding.num_embeddings = end - first
    if padding is not None:
        embedding.padding_idx = padding % num_rows - first if first <= padding % num_rows < end else None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        is_own = (first <= ids) & (ids < end)
        rows = look_up(torch.where(is_own, ids - first, 0)).masked_fill(~is_own[..., None], 0)
        return exchanged(rows, lambda own: all_reduce(own.clone(), group), lambda grad: grad)

    embedding.forward = forward
    return replaced


def shard_head(head: nn.Linear, replaced: Replaced, group: dist.ProcessGroup) -> HeadLoss:
    """Keep this rank's rows of the head.

    Args:
        head: Changed in place.
        replaced: What took the place of what, an embedding to which the head is tied among it; changed in place.
        group: Ranks that hold the other rows; at most as many as the vocabulary has entries.

    Returns:
        The loss to use from now on, the same number on every rank.
    """
    first, end = vocab_share(head.out_features, group.rank(), group.size())
    for kind, whole in list(head.named_parameters(recurse=False)):
        if whole in replaced:
            setattr(head, kind, replaced[whole][0])
        else:
            replaced |= keep_part(head, kind, Part(tuple(whole.shape), 0, ((first, end),)))
    head.out_features = end - first

    def reduce(values: torch.Tensor, *, maximum: bool = False) -> torch.Tensor:
        return all_reduce(values, group, maximum=maximum)

    def loss(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, num_tokens: int,
        of_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        summed = sum_backward(hidden, group)
        return head_loss(summed, weight, bias, targets, num_tokens, of_tokens, first=first, reduce=reduce)

    return loss


class RowSplitLinear(nn.Linear):
    """Linear over this rank's part of the input features; the output is summed over the ranks and shared out by tokens.

    Args:
        weight: `[out, in / degree]`.
        bias: `[out]`, whole; or None. Each rank adds it to its tokens.
        group: Ranks that hold the other parts.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: dist.ProcessGroup) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        self.weight = weight
        if bias is not None:
            self.bias = bias
        self._group, self._sum_and_share = group, opaque(sum_and_share)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., tokens, in / degree]` to `[..., share of the tokens, out]`."""
        part = F.linear(input, self.weight)
        return self.sum_parts(plus_adapter(self, part, input))

    def sum_parts(self, part: torch.Tensor) -> torch.Tensor:
        """`[..., tokens, out]` of this rank's inputs to that of all, of this rank's share of the tokens."""
        out: torch.Tensor = self._sum_and_share(part, self._group)
        return out if self.bias is None else out + self.bias

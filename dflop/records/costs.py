"""What modules and hardware are, and what one costs on the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

TRAINS_ALL, TRAINS_PROJECTOR, TRAINS_ADAPTERS, TRAINS_NONE = "all", "projector", "adapters", "none"
FP8_OFF = "off"
"""Matmuls are in the type of the weights."""
EXPERT_DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What layers of a module have that are alike."""

    name: str
    """`attention`; of other models `gated delta`, `full attention, 8 of 256 experts`."""
    num_params: int
    """Parameters of one layer, all experts included."""
    num_heads: int
    """0: no attention over pairs of tokens."""
    num_kv_heads: int
    head_dim: int
    """Queries are `num_heads * head_dim` wide, which need not be the hidden size."""
    mlp_width: int
    """Width of the MLP; of experts, of all that a token passes through together."""
    num_norm_values: int
    """16-bit values that norms and scales of a layer keep per token for backward; one of 32 bit counts twice."""
    num_mlp_tensors: int = 1
    """Tensors of its width that an MLP keeps: the activation's input, its factor; 2 if a plain one keeps its output."""
    is_gated_mlp: bool = False
    num_active_params: int = 0
    """Parameters that a token passes through; 0: all of them."""
    num_matrix_params: int = 0
    """Size of the largest parameter, of all experts where they are one; 0: a matrix of the MLP or the queries."""
    kept_bytes_per_token: float = 0.0
    """For the backward pass, trained and in bfloat16, as counted on the class; 0: as `cost/activations.py` has it."""
    num_experts: int = 0
    """Experts that expert-parallel ranks may share; 0: the engine knows none."""
    num_active_experts: int = 0
    """Experts a token goes to."""
    num_expert_params: int = 0
    """Parameters of all experts."""
    num_state_values: int = 0
    """Values per token that ranks which share a sample send each other for a layer with a state per head."""
    adapters: tuple[tuple[int, int], ...] = ()
    """Per low-rank adapter of a layer (parameters cut over tensor-parallel ranks, parameters that each has whole)."""
    num_adapter_values: int = 0
    """Values a layer whose adapters alone train keeps per token on top of a layer whose weights train, at most;
    negative where Linears have none, and keep no input."""
    num_adapter_inputs: int = 0
    """The same on top of what it keeps where it is frozen."""
    num_remade_values: int = 0
    """Norm values that a compiled layer recomputes: inputs of a norm that follows a layer scale."""

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_used_params(self) -> int:
        """Parameters that FLOPs come from."""
        return self.num_active_params or self.num_params


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One module of a model: its layers, width and size, as the planner sees it."""

    module: str
    layers: tuple[tuple[LayerKind, int], ...]
    """Runs of layers that are alike and how many each has, in the order of depth."""
    hidden_size: int
    num_edge_params: int
    """Parameters outside the layers (embeddings, patch embedding, projector, head), a tied head counted once."""
    max_pp: int
    """Deepest pipeline the engine can cut the module into; an encoder stays on one stage."""
    tp_choices: tuple[int, ...]
    """Tensor-parallel degrees that the engine can share it out to."""
    num_entry_layers: int = 1
    """First layers that stay together: behind them the features of media are added."""
    vocab_size: int = 0
    """Rows of an LLM's embedding and of its head; 0: an encoder."""
    is_tied: bool = False
    """Whether embedding and head are one parameter."""
    num_entry_params: int = 0
    """Share of `num_edge_params` before the first layer (embedding, patch embedding, learned positions)."""
    num_deep_params: int = 0
    """Share of `num_edge_params` that makes deep features of `deep_layers`, all together; the rest follows the last
    layer."""
    num_projector_matrix_params: int = 0
    """Size of the largest matrix after an encoder's layers; 0: not known, all of them count as one."""
    num_input_values: int = 0
    """Values kept per token before the layers. An encoder keeps pixels of a patch or frames of a spectrum; an LLM keeps
    the deep features of media, which are zeros for text, next to the input of its first layer."""
    deep_layers: tuple[int, ...] = ()
    """Layers of an encoder whose hidden states go to the LLM as deep features."""
    num_edge_adapter_params: int = 0
    """Parameters of low-rank adapters outside the layers, in an encoder's projector."""
    has_adapter_dropout: bool = False
    """Whether some of what adapters are given is dropped in training."""
    keeps_average: bool = False
    """Whether the optimizer keeps an average of the weights that train."""
    merge_tokens: int = 0
    """Tokens of an item that an encoder joins into one row, where it attends over whole frames and does all else row by
    row: context-parallel ranks may cut a frame between two rows. 0: tiles and frames stay whole."""

    @property
    def num_layers(self) -> int:
        return sum(num for _, num in self.layers)

    @property
    def ep_choices(self) -> tuple[int, ...]:
        """Expert-parallel degrees: powers of two that divide the experts of every layer that has some."""
        num_experts = math.gcd(*(kind.num_experts for kind in self.kinds))
        return tuple(ep for ep in EXPERT_DEGREES if ep == 1 or (num_experts and num_experts % ep == 0))

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Every kind once, in the order of first layers."""
        return tuple(dict.fromkeys(kind for kind, _ in self.layers))

    @property
    def num_params(self) -> int:
        return sum(num * kind.num_params for kind, num in self.layers) + self.num_edge_params

    @property
    def query_width(self) -> float:
        """Query width of a mean layer."""
        return self.mean(lambda kind: kind.query_width)

    @property
    def key_width(self) -> float:
        """Key width of a mean layer."""
        return self.mean(lambda kind: kind.key_width)

    @property
    def state_width(self) -> float:
        """`num_state_values` of a mean layer."""
        return self.mean(lambda kind: kind.num_state_values)

    def mean(self, of: Callable[[LayerKind], float]) -> float:
        """Mean over the layers; of one kind exactly its value."""
        first = of(self.layers[0][0])
        return first + sum(num * (of(kind) - first) for kind, num in self.layers) / self.num_layers

    def most(self, of: Callable[[LayerKind], int]) -> int:
        """Largest of any layer."""
        return max(of(kind) for kind, _ in self.layers)


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Where training runs: how many processes (one per device), and what each may use."""

    name: str
    backend: str
    """Launcher backend: `local` or `slurm`."""
    num_nodes: int
    num_processes_per_node: int
    memory_per_process_bytes: int
    device: str
    """`cpu` or `cuda`."""
    num_cores_per_node: int
    """CPU cores shared by the processes of a node; bounds how many run at once when `device` is `cpu`."""

    @property
    def num_processes(self) -> int:
        return self.num_nodes * self.num_processes_per_node

    @property
    def max_concurrency(self) -> int:
        """Processes that can really compute at the same time."""
        if self.device == "cuda":
            return self.num_processes
        return self.num_nodes * min(self.num_processes_per_node, self.num_cores_per_node)


@dataclass(frozen=True, slots=True)
class ParallelSpec:
    """Tensor, pipeline, data and context parallel degrees of one module."""

    tp: int
    pp: int
    dp: int
    """Groups of ranks that each take samples of their own."""
    cp: int = 1
    """Neighbours, of `tp` ranks each, that share the samples of such a group: each has a part of the tokens."""
    ep: int = 1
    """Neighbouring replicas that each keep a part of every layer's experts and send each other tokens."""

    @property
    def mode(self) -> RunMode:
        """How its ranks run a stage in which nothing runs again."""
        return RunMode(self.tp, self.cp, ep=self.ep)

    @property
    def num_replicas(self) -> int:
        """Ranks of a stage that hold the same weights, or share them out."""
        return self.dp * self.cp

    @property
    def group_size(self) -> int:
        """Ranks that run a microbatch of a stage together."""
        return self.tp * self.cp

    @property
    def num_processes(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


@dataclass(frozen=True, slots=True)
class RunMode:
    """How the ranks of a stage run a module; what trains is the same for all that a cost model is asked."""

    tp: int = 1
    cp: int = 1
    """Neighbours that share samples; a load is that of all."""
    recompute: Any = 0.0
    """Share of the layers that run again in the backward pass; an array where it differs between microbatches."""
    ep: int = 1
    """Neighbours that share the experts of every layer."""

    def recomputing(self, frac: float) -> RunMode:
        """The same with such a share."""
        return replace(self, recompute=frac)


ONE_RANK = RunMode()


@dataclass(frozen=True, slots=True)
class Measurement:
    """One timed probe: a module at a shallow depth on one packed group of samples."""

    profile_key: str
    module: str
    hardware: str
    software: str
    dtype: str
    tp: int
    num_layers: int
    group: str
    """How the probe's samples were drawn: `random`, `length_sorted`, `tile_sorted`, `single` or `adaptive`."""
    num_items: int
    num_tokens: int
    sum_sq_tokens: int
    forward_s: float
    backward_s: float
    forward_spread_s: float
    """Half the interquartile range over repeats."""
    backward_spread_s: float
    num_repeats: int
    param_bytes: int
    activation_bytes: int
    """Bytes autograd keeps alive between forward and backward."""
    is_frozen: bool = False
    """Whether the weights took no gradients."""
    recompute: bool = False
    """Whether layers kept their inputs only and ran again in the backward pass."""
    peak_bytes: int = 0
    """Peak of device memory over forward and backward, weights and gradients included; 0 where it is not measured."""
    optimizer_s: float = 0.0
    """One optimizer step over the probe's parameters, median; 0 where there was none."""
    status: str = "ok"
    """`ok`, or `oom`: the group did not fit, its seconds are 0 and only its sizes say anything."""
    fp8: str = FP8_OFF
    """Recipe by which Linears of decoder layers multiply in FP8 (`tensorwise`, `rowwise`); `off`: in `dtype`."""


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """One timed message or collective between processes, or copy of a node's devices to and from the host."""

    profile_key: str
    hardware: str
    software: str
    op: str
    """`p2p`, `all_reduce`, `all_gather` or `host_copy`."""
    num_ranks: int
    num_nodes: int
    num_bytes: int
    """Bytes of one rank's buffer: what it sends, reduces, copies each way, or gathers from the others in all."""
    seconds: float
    spread_s: float
    """Half the interquartile range over repeats."""
    num_repeats: int


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Fitted cost of one operation between processes: `latency_s + num_bytes / bytes_per_s`."""

    profile_key: str
    hardware: str
    software: str
    op: str
    num_ranks: int
    num_nodes: int
    latency_s: float
    bytes_per_s: float
    source: str
    """`measured` or `analytic`."""
    num_measurements: int
    median_error_frac: float
    fitted_at_s: float = 0.0
    """Unix time of the fit; 0: unknown."""


@dataclass(frozen=True, slots=True)
class CostTerms:
    """Cost of one phase: layers * (layer terms) + edge terms. Edge = everything outside the layers.

    A layer costs `layer_fixed + layer_per_token * t + sum_k layer_bends[k] * min(t, layer_knots[k]) +
    layer_per_sq_token * sum_sq` for t tokens: piecewise linear, and never falling.
    """

    layer_fixed: float
    layer_per_token: float
    """Slope beyond the last knot."""
    layer_per_sq_token: float
    edge_fixed: float
    edge_per_token: float
    edge_per_item: float
    """Items as in `ModuleLoad`: of an LLM, tokens that carry loss."""
    layer_knots: tuple[float, ...] = ()
    """Tokens at which the slope changes, ascending."""
    layer_bends: tuple[float, ...] = ()
    """By how much the slope falls at each knot; negative where it rises."""

    def __post_init__(self) -> None:
        if len(self.layer_knots) != len(self.layer_bends):
            raise ValueError(f"{len(self.layer_knots)} layer_knots, {len(self.layer_bends)} layer_bends")


@dataclass(frozen=True, slots=True)
class CostTable:
    """Fitted cost of one module at one tp on one kind of hardware."""

    table_id: str
    profile_key: str
    module: str
    hardware: str
    software: str
    dtype: str
    tp: int
    source: str
    """`measured` or `analytic`."""
    num_layers: int
    """Depth of the module in the full model."""
    forward_s: CostTerms
    backward_s: CostTerms
    activation_bytes: CostTerms
    layer_param_bytes: int
    edge_param_bytes: int
    num_measurements: int
    median_error_frac: float
    """Median absolute relative error of forward + backward seconds on probes that the fit did not see."""
    p95_error_frac: float
    trains: str = TRAINS_ALL
    """`all`; `none`: no weights; `projector`: of an encoder those outside its tower; `adapters`: those alone."""
    recompute: bool = False
    """As in `Measurement`: a table holds for one way of running the module."""
    min_tokens: int = 0
    max_tokens: int = 0
    """Tokens of the smallest and the largest probe; both 0: unknown."""
    max_mean_length: float = 0.0
    """Largest `sum_sq_tokens / num_tokens` of a probe: the length attention saw; 0: unknown."""
    noise_frac: float = 0.0
    """Median spread of a probe over its repeats, relative: no prediction can be better than this."""
    optimizer_s_per_param: float = 0.0
    """Seconds of an optimizer step per parameter; 0: unknown."""
    fitted_at_s: float = 0.0
    """Unix time of the fit; 0: unknown. No part of `table_id`."""
    fp8: str = FP8_OFF
    """As in `Measurement`."""

    @property
    def mode(self) -> RunMode:
        return RunMode(self.tp, recompute=self.recompute)

    @property
    def is_frozen(self) -> bool:
        return self.trains == TRAINS_NONE

    @property
    def trains_layers(self) -> bool:
        return self.trains == TRAINS_ALL

    @property
    def trains_adapters(self) -> bool:
        return self.trains == TRAINS_ADAPTERS

"""What a model of transformers is made of, as plain values: kinds of decoder layers, both ends, encoders.

`structure.py` reads them from the classes of a config; nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass

_SOUND = ("audio", "speech", "acoustic", "semantic", "sound")
"""Parts of names of modules that hear."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a query and of a key; the config's own, which need not be hidden size over heads."""
    value_dim: int
    window: int = 0
    """Keys that a token attends to at most, itself among them; 0: all before it."""
    chunk: int = 0
    """Tokens attend inside chunks of this length; 0: no chunks."""
    is_causal: bool = True

    @property
    def flops_per_pair(self) -> int:
        """Forward FLOPs of one query and one key that it attends to, over all heads."""
        return 2 * self.num_heads * (self.head_dim + self.value_dim)

    def num_pairs(self, num_tokens: int) -> int:
        """Pairs of query and key in a sample of `num_tokens`."""
        if not self.is_causal:
            return num_tokens**2
        if self.chunk:
            whole, rest = divmod(num_tokens, self.chunk)
            return whole * _triangle(self.chunk) + _triangle(rest)
        reach = min(self.window or num_tokens, num_tokens)
        return reach * (num_tokens - reach) + _triangle(reach)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Decoder layers with the same class, `layer_types` entry, parameters and attention."""

    mixer: str
    """How tokens see each other: `full`, `sliding`, `chunked` or `latent` attention, `gated delta`, `state space`,
    `convolution`, or `none`."""
    layers: tuple[int, ...]
    """Indices in the decoder."""
    num_params: int
    """Parameters of one layer, all experts included."""
    num_active_params: int
    """Parameters of one layer that a token passes through."""
    flops_per_token: float
    """Forward FLOPs of matrix products outside attention, per token and layer."""
    kept_bytes_per_token: float
    """Bytes in bfloat16 that one layer keeps for its backward pass, per token."""
    kept_bytes: float
    """What it keeps beside those, whatever the number of tokens."""
    attention: tuple[AttentionCall, ...]
    num_experts: int
    num_active_experts: int
    degrees: tuple[int, ...]
    """Tensor-parallel degrees, up to 16, that the class's own plan and the heads allow; of towers, those at which the
    engine has a rule to cut the layer."""
    mlp_width: int = 0
    """Width of the MLP; of experts, of all that a token passes through together; 0: no MLP."""
    is_gated_mlp: bool = False
    num_matrix_params: int = 0
    """Size of the largest parameter."""
    num_stacked_params: int = 0
    """Parameters of all experts, where one module stacks them and is called with a routing; 0: none does."""
    num_state_values: int = 0
    """Values per token that go into a gated delta rule and come out of it."""

    @property
    def name(self) -> str:
        """`full attention`, or `gated delta, 8 of 256 experts`."""
        experts = f", {self.num_active_experts} of {self.num_experts} experts" if self.num_experts else ""
        return self.mixer + experts

    def attention_flops(self, num_tokens: int) -> float:
        """Forward FLOPs of one layer's attention in a sample of `num_tokens`."""
        return float(sum(call.flops_per_pair * call.num_pairs(num_tokens) for call in self.attention))


@dataclass(frozen=True, slots=True)
class Encoder:
    """A tower of the model with what carries its rows into the decoder's width."""

    path: str
    medium: str
    """`audio` or `vision`, as modules of plans are named."""
    layers: str
    """Path of its longest list of layers, relative to the tower; empty where it has none, and is one layer."""
    num_layers: int
    num_params: int
    """Parameters of the tower."""
    projector: tuple[str, ...]
    """Paths of its projector's modules; none where the tower ends in the decoder's width."""
    num_projector_params: int
    num_entry_params: int = 0
    """Share of `num_params` before the layers."""
    num_matrix_params: int = 0
    """Size of the largest matrix after the layers."""
    deep_layers: tuple[int, ...] = ()
    """Layers whose hidden states the decoder is given as well."""
    num_deep_params: int = 0
    """Share of `num_params` that makes features of these."""
    hidden_size: int = 0
    """Hidden size of its layers as they run; 0: they were not run."""
    num_input_values: float = 0.0
    """Values kept per token before the layers."""
    kinds: tuple[LayerKind, ...] = ()
    """Kinds of its layers, as they are run."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A whole model."""

    model_type: str
    decoder: str
    """Path of the text model: input embeddings and a list of layers."""
    head: str
    """Path of the head; empty where there is none."""
    kinds: tuple[LayerKind, ...]
    """In the order of their first layers."""
    encoders: tuple[Encoder, ...]
    hidden_size: int
    vocab_size: int
    num_params: int
    """Parameters of the model as transformers builds it; a tied weight counts once."""
    num_entry_params: int
    """The decoder's embeddings."""
    num_exit_params: int
    """What else the decoder has outside its layers, and the head unless it is tied."""
    num_other_params: int
    """Outside decoder, encoders and projectors."""
    is_tied: bool
    others: tuple[str, ...] = ()
    """Paths of these."""
    is_whole: bool = False
    """Whether layers share embeddings or keys, so that the decoder stays on one stage."""

    @property
    def main_encoders(self) -> tuple[Encoder, ...]:
        """The deepest encoder of each medium, vision first; others of a medium run with it."""
        deepest = sorted(self.encoders, key=lambda of: -of.num_layers)
        media = sorted({of.medium for of in deepest}, reverse=True)
        return tuple(next(of for of in deepest if of.medium == medium) for medium in media)

    def encoder_of(self, kind: str) -> Encoder | None:
        """The encoder that takes items of a kind (`image`, `video`, `audio`); None where there is none."""
        medium = "audio" if kind == "audio" else "vision"
        return next((of for of in self.main_encoders if of.medium == medium), None)

    @property
    def num_layers(self) -> int:
        return sum(len(kind.layers) for kind in self.kinds)

    def sum_sq_tokens(self, num_tokens: int) -> int:
        """Squared attention length of a sample, averaged over the layers by the width of their queries.

        0 where every layer with attention sees all tokens before it: then it is the square of the length.
        """
        calls = [(len(kind.layers), call) for kind in self.kinds for call in kind.attention]
        if all(call.num_pairs(num_tokens) == _triangle(num_tokens) for _, call in calls):
            return 0
        widths = [num * call.num_heads * call.head_dim for num, call in calls]
        pairs = sum(
            w * (2 * call.num_pairs(num_tokens) - num_tokens) for w, (_, call) in zip(widths, calls, strict=True)
        )
        return round(pairs / sum(widths))

    @property
    def num_active_params(self) -> int:
        """Parameters that a token of the decoder passes through, both ends included."""
        inside = sum(len(kind.layers) * kind.num_active_params for kind in self.kinds)
        return inside + self.num_entry_params + self.num_exit_params

    @property
    def num_counted_params(self) -> int:
        """The sum of all parts; equal to `num_params` unless a part was missed or counted twice."""
        layers = sum(len(kind.layers) * kind.num_params for kind in self.kinds)
        towers = sum(encoder.num_params + encoder.num_projector_params for encoder in self.encoders)
        return layers + towers + self.num_entry_params + self.num_exit_params + self.num_other_params

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that every kind of layer allows."""
        first, *others = (set(kind.degrees) for kind in self.kinds)
        return tuple(sorted(first.intersection(*others)))


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def medium_of(path: str, *, hears_only: bool = False) -> str:
    """`audio` or `vision`, by the path of a module of a model that may take sounds only."""
    return "audio" if hears_only or any(word in path for word in _SOUND) else "vision"

"""Tiny stages of every structure that is cut, built through transformers: how to build, cut and run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from dflop.models import attention, splits
from dflop.models.build import LlmStage, Stage, cut_stage
from dflop.models.family import Decoder
from dflop.models.tensor_split import TensorSplit
from tests.train import synthetic

HIDDEN, NUM_LAYERS, VOCAB = 32, 2, 67
LENGTHS = (9, 1, 14)


class TowerStage(Stage):
    """A bare tower as a stage."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(dict(module.named_parameters()))
        self.module = module


@dataclass(frozen=True)
class Stack:
    """A stage that any process can build, and one microbatch for it."""

    build: Callable[[], Stage]
    layers: str
    """Path from the stage to its layers."""
    split: TensorSplit
    forward: Callable[[Stage], torch.Tensor]
    """Output of one microbatch with several packed sequences or items."""

    def loss(self, stage: Stage, out: torch.Tensor) -> torch.Tensor:
        if isinstance(stage, LlmStage):
            where = torch.arange(0, sum(LENGTHS), 2)
            return stage.loss_sum(out, where, numbers(len(where), 11, below=VOCAB))
        return (out - numbers(out.shape, 12)).square().sum()


def numbers(shape: object, seed: int, *, below: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (shape,) if isinstance(shape, int) else shape
    return torch.randint(below, size, generator=generator) if below else torch.randn(size, generator=generator)


def make(model_class: str, config_class: str, config: Mapping[str, object], options: Mapping[str, object]):
    """A transformers model with all its parameters random, norms and biases too, the same in every process."""
    import transformers
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as qwen2_5_omni
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5_vl
    from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

    def find(name):
        return next(getattr(m, name) for m in (transformers, qwen2_5_omni, qwen2_5_vl, qwen3_vl) if hasattr(m, name))

    attention.register()
    torch.manual_seed(3)
    model = find(model_class)._from_config(
        find(config_class)(**{**config, **options}), attn_implementation=attention.PACKED, dtype=torch.float32
    )
    for seed, p in enumerate(model.parameters()):
        p.data += 0.1 * numbers(p.shape, seed)
    return model.train()


DECODER = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 4, "layer_types": ["full_attention"] * NUM_LAYERS,
}  # fmt: skip


def decoder(kind: str, split: TensorSplit, **options: object) -> Stack:
    """A decoder with embedding and head, as one LLM stage: three packed sequences."""
    config = {"tie_word_embeddings": False, **DECODER}

    def build() -> LlmStage:
        family = SimpleNamespace(decoder=Decoder("model", "lm_head", ""), towers={})
        return LlmStage(make(f"{kind}ForCausalLM", f"{kind}Config", config, options), family, (0, NUM_LAYERS))

    def forward(stage: LlmStage) -> torch.Tensor:
        hidden = stage.embed(numbers(sum(LENGTHS), 4, below=VOCAB), (), ())
        return decode(stage.decoder, hidden, torch.cat([torch.arange(n) for n in LENGTHS])[None])

    return Stack(build, "decoder.layers", split, forward)


def decode(module: torch.nn.Module, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    out = module(inputs_embeds=hidden[None], position_ids=positions, use_cache=False, cu_seq_lens_q=cu_seqlens)
    return out.last_hidden_state[0]


def multimodal_decoder(model_class: str, config_class: str, split: TensorSplit) -> Stack:
    """A decoder with three rope positions per token, without head."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = {**DECODER, "hidden_size": 64, "head_dim": 8, "rope_parameters": rope}

    def build() -> TowerStage:
        return TowerStage(make(model_class, config_class, config, {}))

    def forward(stage: TowerStage) -> torch.Tensor:
        num_tokens = sum(LENGTHS)
        return decode(stage.module, numbers((num_tokens, 64), 2), numbers((3, 1, num_tokens), 5, below=9))

    return Stack(build, "module.layers", split, forward)


def tower(
    model_class: str,
    config_class: str,
    layers: str,
    split: TensorSplit,
    inputs: tuple[object, ...],
    output: str = "last_hidden_state",
    **config: object,
) -> Stack:
    def build() -> TowerStage:
        return TowerStage(make(model_class, config_class, config, {}))

    def forward(stage: TowerStage) -> torch.Tensor:
        return getattr(stage.module(*inputs), output)

    return Stack(build, f"module.{layers}", split, forward)


def native(prefix: str, split: TensorSplit, **config: object) -> Stack:
    """A native-resolution tower of Qwen: two images and a video in one packed sequence."""
    grids = torch.tensor([(1, 4, 6), (1, 8, 4), (2, 4, 4)])
    patches = numbers((int(grids.prod(dim=1).sum()), 3 * 2 * 14**2), 6)
    return tower(
        f"{prefix}Model" if prefix.startswith("Qwen3") else "Qwen2_5_VisionTransformerPretrainedModel",
        f"{prefix}Config", "blocks", split, (patches, grids), "pooler_output", depth=NUM_LAYERS, hidden_size=HIDDEN,
        intermediate_size=40, num_heads=4, out_hidden_size=24, patch_size=14, **config,
    )  # fmt: skip


def omni(module: str, layers: str, split: TensorSplit) -> Stack:
    """An encoder of the family that trains, cut out of its model: two items of different length."""
    if module == "audio":
        inputs = (numbers((128, 76), 7), torch.tensor([[44, 0, 0], [32, 0, 0]]))
    else:
        inputs = (numbers((72, 1176), 7), torch.tensor([(1, 4, 10), (2, 4, 4)]))

    def build() -> Stage:
        return cut_stage(synthetic.tiny_model(), synthetic.family(), module, (0, 2))

    return Stack(build, f"module.{layers}", split, lambda stage: stage(*inputs))


def internvit(**config: object) -> Stack:
    return tower(
        "InternVLVisionModel", "InternVLVisionConfig", "encoder.layer", splits.INTERNVIT, (numbers((3, 3, 28, 28), 9),),
        image_size=28, patch_size=14, attention_bias=True, **VIT, **config,
    )  # fmt: skip


VIT = {"hidden_size": HIDDEN, "intermediate_size": 40, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4}
STACKS = {
    "Qwen2": decoder("Qwen2", splits.QWEN2),
    "Llama": decoder("Llama", splits.QWEN2, attention_bias=True, mlp_bias=True),
    "Qwen3": decoder("Qwen3", splits.QWEN3, head_dim=8, attention_bias=True),
    "Qwen3 tied": decoder("Qwen3", splits.QWEN3, head_dim=8, tie_word_embeddings=True),
    "Qwen2.5-VL text": multimodal_decoder("Qwen2_5_VLTextModel", "Qwen2_5_VLTextConfig", splits.QWEN2),
    "Qwen3-VL text": multimodal_decoder("Qwen3VLTextModel", "Qwen3VLTextConfig", splits.QWEN3),
    "Omni text": multimodal_decoder("Qwen2_5OmniThinkerTextModel", "Qwen2_5OmniTextConfig", splits.QWEN2),
    "SigLIP": tower(
        "SiglipVisionModel", "SiglipVisionConfig", "encoder.layers", splits.SIGLIP, (numbers((3, 3, 28, 28), 9),),
        image_size=28, patch_size=14, vision_use_head=False, **VIT,
    ),
    "InternVL": internvit(),
    "Qwen2.5-VL vision": native("Qwen2_5_VLVision", splits.QWEN2_5_VISION, window_size=112, fullatt_block_indexes=[1]),
    "Qwen3-VL vision": native(
        "Qwen3VLVision", splits.QWEN3_VISION, num_position_embeddings=64, deepstack_visual_indexes=[0]
    ),
    "Qwen2-Audio": tower(
        "Qwen2AudioEncoder", "Qwen2AudioEncoderConfig", "layers", splits.QWEN2_AUDIO, (numbers((2, 16, 40), 9),),
        num_mel_bins=16, encoder_layers=NUM_LAYERS, encoder_attention_heads=4, encoder_ffn_dim=40, d_model=HIDDEN,
        max_source_positions=20,
    ),
    "Omni vision": omni("vision", "blocks", splits.OMNI_VISION),
    "Omni audio": omni("audio", "layers", splits.OMNI_AUDIO),
}  # fmt: skip


def with_split(name: str, **fields: object) -> Stack:
    return replace(STACKS[name], split=replace(STACKS[name].split, **fields))

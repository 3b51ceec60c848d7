"""A small copy of a config: two layers of each kind, the same code paths, a width of 64.

Sizes are replaced by name, in every section of the config; what depends on them follows: rotary sections, lists with an
entry per layer, token ids. Latent attention keeps its rule that a head of keys is what rotates plus what does not.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflop.models.generic.classes import ACTIVE, SHARED, entry_of
from dflop.models.generic.structure import read_structure
from dflop.models.generic.values import Structure
from dflop.models.unsupported import EXPERTS

HIDDEN, HEADS, HEAD_DIM, VOCAB = 64, 2, 32, 160
_TEXT: Mapping[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 128, "num_attention_heads": HEADS, "head_dim": HEAD_DIM,
    "vocab_size": VOCAB, "max_position_embeddings": 512, "sliding_window": 8, "attention_chunk_size": 8,
    **dict.fromkeys(EXPERTS, 4), "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "dense_intermediate_size": 128, "intermediate_size_mlp": 128, "num_attention_experts": 4, "moe_latent_size": 32,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "qk_head_dim": 32,
    "v_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "global_head_dim": HEAD_DIM, "num_global_key_value_heads": 1,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16, "query_pre_attn_scalar": HEAD_DIM,
    "index_n_heads": 4, "index_head_dim": 16, "block_ff_dim": 128, "conv_dim": HIDDEN, "conv_dim_out": HIDDEN,
    "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "chunk_size": 16,
}  # fmt: skip
_TOWER: Mapping[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_attention_heads": 4, "num_heads": 4, "d_model": HIDDEN,
    "num_key_value_heads": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "depth": 2,
    "embed_dim": HIDDEN, "num_hidden_layers": 2, "encoder_layers": 2, "num_layers": 2, "out_hidden_size": HIDDEN,
    "output_dim": HIDDEN, "num_position_embeddings": 64, "head_dim": 16, "hidden_dim": HIDDEN, "mlp_dim": 128,
    "text_hidden_size": HIDDEN, "projection_dim": HIDDEN, "projector_hidden_size": HIDDEN, "vocab_size": VOCAB,
    "position_embedding_size": HIDDEN, "num_global_layers": 2, "cross_attention_hidden_size": HIDDEN,
    "output_hidden_size": HIDDEN, "encoder_hidden_size": HIDDEN,
    "num_experts": 4, "moe_intermediate_size": 32, "intermediate_dim": 128, "num_conv_pos_embeddings": 16,
    "vision_output_dim": HIDDEN, "projector_input_dim": HIDDEN, "projector_output_dim": HIDDEN,
    "downsample_channels": HIDDEN, "mm_embed_dim": HIDDEN, "mm_posemb_size": 64,
    "output_proj_dims": HIDDEN,
}  # fmt: skip
_WHOLE: Mapping[str, Any] = {
    "mm_tokens_per_image": 4, "image_seq_length": 4, "alignment_intermediate_size": 128,
    "projector_hidden_size": HIDDEN, "projection_dim": HIDDEN, "projector_intermediate_size": 128,
    "projection_hidden_size": HIDDEN, "hidden_size": HIDDEN, "vocab_size": VOCAB, "adapter_intermediate_dim": 128,
}  # fmt: skip
_IDS = ("_token_id", "_token_index")
"""Ends of entries that are ids of tokens."""
_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")
_PATCHES = 4
"""Patches of a picture's side; two rows and two columns are left where a projector joins four patches to one."""


def shrunk(config: Any, structure: Structure) -> Any:
    """A new config of the same class.

    Args:
        config: The trained part of a model's; stays as it is.
        structure: Of `config`.
    """
    kinds = {kind.name for kind in structure.kinds}
    small = _shrunk(config, structure, _chosen_layers(config, structure))
    if {kind.name for kind in read_structure(small).kinds} == kinds:
        return small
    # What kind a layer is of follows from its index, and not from a list: the model's first layers keep theirs.
    needed = max(kind.layers[:2][-1] for kind in structure.kinds) + 1
    return _shrunk(config, structure, tuple(range(min(needed + needed % 2, structure.num_layers))))


def _chosen_layers(config: Any, structure: Structure) -> tuple[int, ...]:
    """Two layers of each kind, the first of all kinds before the second of any; four at least where there are."""
    ranked = [(place, kind.layers[0], layer) for kind in structure.kinds for place, layer in enumerate(kind.layers)]
    num = max(4, sum(min(len(kind.layers), 2) for kind in structure.kinds))
    chosen = [layer for _, _, layer in sorted(ranked)[:num]]
    if entry_of(config.get_text_config(), SHARED):
        last = range(structure.num_layers - 2, structure.num_layers)
        chosen = [*(layer for layer in chosen if layer not in last), *last]
    return tuple(chosen)


def _shrunk(config: Any, structure: Structure, layers: Sequence[int]) -> Any:
    content = _section(config, config.get_text_config(), structure.num_layers, layers, {})
    small = type(config).from_dict({**content, "tie_word_embeddings": structure.is_tied})
    text = small.get_text_config()
    if text is not small and hasattr(text, "tie_word_embeddings"):
        text.tie_word_embeddings = structure.is_tied
    return small


def _section(config: Any, text: Any, old: int, layers: Sequence[int], ids: dict[Any, int]) -> dict[str, Any]:
    """A section of a config and all inside it, as a mapping that its class reads.

    Args:
        config: The section.
        text: The section of the text model.
        old: Layers of the text model.
        layers: Those that are kept.
        ids: Small token ids of large ones, of placeholders without one by their name; grows.
    """
    from transformers import PreTrainedConfig

    content: dict[str, Any] = config.to_dict()
    inner = {key: section for key in content if isinstance(section := entry_of(config, key), PreTrainedConfig)}
    if config is text:
        content = _text(config, content, old, layers)
    else:
        has_text = any(section is text for section in inner.values())
        content = _named(content, _WHOLE) if has_text else _tower(content)
    tokens = [name for alias, name in config.attribute_map.items() if alias.endswith(_IDS)]
    for key, value in content.items():
        if (key.endswith(_IDS) or key in tokens) and isinstance(value, int):
            content[key] = ids.setdefault(value, len(ids) + 3) if value >= 0 else value
        elif key in _PLACEHOLDERS and value is None:  # a default that leaves it to the release
            content[key] = ids.setdefault(key, len(ids) + 3)
        elif key.endswith("_token_id") and isinstance(value, list):
            content[key] = [ids.setdefault(each, len(ids) + 3) for each in value]
        elif key == "projector_patch_to_query_dict":  # rows of a picture by its patches
            content[key] = {_PATCHES**2: 4}
        elif key.startswith("vision_feature_layer"):  # towers have two layers
            content[key] = _last_layers(value)
    content |= {key: _section(section, text, old, layers, ids) for key, section in inner.items()}
    if (joined := content.get("out_hidden_size")) and "vision_config" in inner:  # of patches that are joined to one
        content["out_hidden_size"] = joined * HIDDEN // config.vision_config.hidden_size
    if points := content.get("image_grid_pinpoints"):
        side, small = config.vision_config.image_size, content["vision_config"]["image_size"]
        content["image_grid_pinpoints"] = [[n * small // side for n in point] for point in points]
    return content


def _last_layers(value: Any) -> Any:
    if isinstance(value, list):
        return [_last_layers(each) for each in value]
    return max(-2, min(value, 1)) if isinstance(value, int) else value


def _named(content: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Entries replaced by name; a list gets as many of the new number, what is unset or 0 stays so."""
    found = dict(content)
    for key, size in sizes.items():
        old = found.get(key)
        if isinstance(old, list) and old and all(isinstance(each, int) for each in old):
            found[key] = [size] * len(old)
        elif isinstance(old, int | float) and not isinstance(old, bool) and old:
            found[key] = size
    return found


def _text(config: Any, content: Mapping[str, Any], old: int, layers: Sequence[int]) -> dict[str, Any]:
    found = _named({key: of_layers(key, value, old, layers) for key, value in content.items()}, _TEXT)
    if isinstance(heads := content.get("num_key_value_heads"), int):
        found["num_key_value_heads"] = HEADS if heads == entry_of(config, "num_attention_heads") else 1
    if content.get("qk_rope_head_dim"):  # latent attention: as many keys as queries, and a part of a head rotates
        found["num_key_value_heads"] = HEADS
        if content.get("head_dim"):  # some count the part that rotates as a head, some both parts
            rotates = content["head_dim"] == content["qk_rope_head_dim"]
            found["head_dim"] = found["qk_rope_head_dim" if rotates else "qk_head_dim"]
    for key in ACTIVE:
        if isinstance(found.get(key), int):
            found[key] = min(found[key], 2)
    if found.get(SHARED):
        found[SHARED] = 2
    rope = dict(found.get("rope_parameters") or {})
    if section := _default_section(config):
        rope.setdefault("mrope_section", section)
    return found | ({"rope_parameters": _rope(rope, found.get("head_dim") or HEAD_DIM)} if rope else {})


def of_layers(key: str, value: Any, old: int, layers: Sequence[int]) -> Any:
    """An entry about layers, for those that are kept: their number, an element each, indices, a count of the first."""
    if key == "num_hidden_layers":
        return len(layers)
    if key == "first_k_dense_replace":
        return sum(layer < value for layer in layers)
    if key == "per_layer_config" and value:
        by_index = {int(index): _named(sizes, _TEXT) for index, sizes in value.items()}
        return {new: by_index[layer] for new, layer in enumerate(layers) if layer in by_index}
    if isinstance(value, list) and len(value) == old:
        return [value[layer] for layer in layers]
    if isinstance(value, str) and "pattern" in key and len(value) == old:
        return "".join(value[layer] for layer in layers)
    is_indices = key.endswith(("layers", "idxs")) and isinstance(value, list)
    if is_indices and all(isinstance(each, int) and 0 <= each < old for each in value):
        return [new for new, layer in enumerate(layers) if layer in value]
    return value


def _default_section(config: Any) -> list[int]:
    """Rotary sections that a class has where its config states none; empty: it has none, or a kind of layer each."""
    rope = entry_of(config, "rope_parameters") or {}
    if "mrope_section" in rope or any(isinstance(value, Mapping) for value in rope.values()):
        return []
    name = type(config).__module__.replace("configuration_", "modeling_")
    stated = re.search(r"mrope_section\", \[([\d, ]+)\]", inspect.getsource(importlib.import_module(name)))
    return [int(part) for part in stated[1].split(",")] if stated else []


def _rope(rope: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Rotary parameters for heads of another width; per kind of layer where they are stated so."""
    found: dict[str, Any] = {k: _rope(v, head_dim) if isinstance(v, Mapping) else v for k, v in rope.items()}
    half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    if parts := rope.get("mrope_section"):
        small = [part * half // sum(parts) for part in parts]
        found["mrope_section"] = [*small[:-1], half - sum(small[:-1])]
    for key in ("short_factor", "long_factor"):
        if key in rope:
            found[key] = rope[key][:half]
    return found


def _tower(content: Mapping[str, Any]) -> dict[str, Any]:
    """A section that is not the text's: two layers, and pictures of four by four patches."""
    depth = next((content[key] for key in ("num_hidden_layers", "depth", "encoder_layers", "num_layers")
                  if isinstance(content.get(key), int)), 0)  # fmt: skip
    found = _named({key: _few(key, value, depth) for key, value in content.items()}, _TOWER)
    patch, sides = content.get("patch_size"), content.get("image_size")
    if isinstance(sides, list) and content.get("num_position_embeddings"):  # a position per patch of these sides
        found["num_position_embeddings"] = content["num_position_embeddings"]
    if isinstance(content.get("image_size"), int):
        found["image_size"] = _PATCHES * (patch if isinstance(patch, int) else 14)
    return found


def _few(key: str, value: Any, depth: int) -> Any:
    """The first two different entries of a list with one per layer; of layers' indices those that are left."""
    if not isinstance(value, list) or not depth:
        return value
    if len(value) == depth > 2:
        different = list(dict.fromkeys(value))
        return (different * 2)[:2]
    if key.endswith("indexes") and all(isinstance(each, int) for each in value):
        return list(range(min(len(value), 2)))
    return value

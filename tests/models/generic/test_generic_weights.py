import pytest
import torch
from safetensors.torch import load_file, save_file

from dflop.errors import ConfigError
from dflop.models.generic import classes
from dflop.models.weights import WeightFolder, build_empty, write_folder
from tests.models.generic.small import Small

NAMES = {
    "qwen3_5": "model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
    "qwen3_5_moe": "model.language_model.layers.0.mlp.experts.3.gate_proj.weight",
    "qwen3_vl_moe": "model.language_model.layers.0.mlp.experts.gate_up_proj",
    "internvl": "language_model.model.layers.0.mlp.experts.3.gate_proj.weight",
    "mistral3": "language_model.model.layers.0.self_attn.q_proj.weight",
}
"""A name in releases of each type: experts apart or stacked, a decoder under another path."""


@pytest.mark.parametrize("kind", NAMES)
def test_a_written_folder_has_the_releases_names_and_reads_back_equal(kind, tmp_path):
    subject = Small(kind)
    family, model = subject.family, subject.build()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    write_folder(family, family.hf_config, weights, tmp_path, max_shard_bytes=100_000)
    assert NAMES[kind] in {key for file in tmp_path.glob("*.safetensors") for key in load_file(file)}
    read = WeightFolder(tmp_path, build_empty(family, family.hf_config, torch.float32)).read
    for name, want in weights.items():
        assert torch.equal(read(name), want), name
    expert = next((name for name, p in weights.items() if p.ndim == 3 and "expert" in name), None)
    if expert is not None:
        rows = [(0, 8), (16, 20)]
        assert torch.equal(read(expert, 1, rows), torch.cat([weights[expert][:, a:b] for a, b in rows], dim=1))
    auto = type(classes.build(classes.config_of(family.hf_config), attention="eager"))
    loaded, ids = auto.from_pretrained(tmp_path, dtype="auto").eval(), torch.arange(10, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, subject.plain().eval()(input_ids=ids).logits)


def test_experts_that_are_missing_are_refused_when_they_are_read(tmp_path):
    subject = Small("qwen3_5_moe")
    family, model = subject.family, subject.build()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    write_folder(family, family.hf_config, weights, tmp_path, max_shard_bytes=10**9)
    file = tmp_path / "model.safetensors"
    save_file({key: x for key, x in load_file(file).items() if ".layers.1.mlp.experts.3." not in key}, file)
    folder = WeightFolder(tmp_path, build_empty(family, family.hf_config, torch.float32))
    folder.read("model.language_model.layers.0.mlp.experts.down_proj")
    with pytest.raises(ConfigError, match=r"1 of another shape, e\.g\. `model\.language_model\.layers\.1\.mlp"):
        folder.read("model.language_model.layers.1.mlp.experts.down_proj")

import dataclasses
from pathlib import Path

from dflop.records import LLM, ModuleLoad
from dflop.store.profile_frames import profile_frame
from tests.builders import make_sample
from tests.store.asking import fill

GROUPS = {"text": [], "single_image": ["image"], "multi_image": ["image", "image"], "video": ["video", "video"],
          "audio": ["audio"], "mixed": ["image", "audio"]}  # fmt: skip


def test_a_profile_is_a_row_per_sample_with_its_group_and_its_load_of_every_module(tmp_path: Path) -> None:
    samples = []
    for index, kinds in enumerate(GROUPS.values()):
        modules = ["audio" if kind == "audio" else "vision" for kind in kinds]
        sample = make_sample(index, 10 + index, [(module, 40 + number) for number, module in enumerate(modules)])
        items = tuple(dataclasses.replace(i, kind=kind) for i, kind in zip(sample.items, kinds, strict=True))
        samples.append(dataclasses.replace(sample, items=items, weight=1.0 + index))
    found = profile_frame(fill(tmp_path, *samples[::-1]), "data")
    assert found["group"].to_list() == list(GROUPS)
    for name in ("sample_index", "sample_id", "num_text_tokens", "num_supervised_tokens", "media_level", "weight"):
        assert found[name].to_list() == [getattr(sample, name) for sample in samples]
    for module in ("audio", "vision", LLM):
        names = [f"{module}_{name}" for name in ("items", "tokens", "sum_sq_tokens")]
        assert [ModuleLoad(*row) for row in found.select(names).rows()] == [sample.load(module) for sample in samples]
    assert found.columns[-1] == f"{LLM}_sum_sq_tokens"
    assert profile_frame(tmp_path, "none").is_empty()

import importlib.metadata
import json
from pathlib import Path

import pytest

from dflop.data.dataset_profile import profile_shard
from dflop.data.demo import MIXTURE, make_demo_dataset
from dflop.errors import ConfigError
from dflop.models import FAMILIES, load_family

FEW, OTHERS = ("internvl", "qwen2_audio"), pytest.mark.lane("instances")
NAMES = ["annotations.jsonl", "media", "provenance.json", "tokenizer.json"]


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_all_rows_are_healthy_and_the_mixture_holds(demo, family):
    shapes, quarantined = profile_shard(demo, family, 0, 1)
    assert quarantined == []
    kinds = [[item.kind for item in shape.items] for shape in shapes]
    for group, of_one in {"single_image": ["image"], "video": ["video"], "audio": ["audio"], "text": []}.items():
        assert abs(kinds.count(of_one) - MIXTURE[group] * 40) <= 1
    lengths = sorted(shape.num_llm_tokens for shape in shapes)
    assert lengths[-1] > 4 * lengths[len(lengths) // 2], "sizes are heavy-tailed"


def test_every_file_has_its_provenance(demo):
    folder = demo.entries[0].paths[0].parent
    provenance = json.loads((folder / "provenance.json").read_text())
    media = {name for name in content(folder) if name.startswith("media/")}
    assert {entry["file"] for entry in provenance["files"]} == media
    for entry in provenance["files"]:
        assert entry["origin"]
        assert entry["sources"]
        for source in entry["sources"]:
            assert source["version"] == importlib.metadata.version(source["package"])
            assert source["licence"]
    assert all(json.loads(line)["origin"] for line in demo.entries[0].paths[0].read_text("utf-8").splitlines())


def test_same_seed_same_bytes_other_seed_other_rows(tmp_path):
    (tmp_path / "b").mkdir()  # an empty folder is taken
    made = [
        make_demo_dataset(tmp_path / name, num_samples=8, seed=seed) for name, seed in (("a", 7), ("b", 7), ("c", 8))
    ]
    first, again, other = (content(dataset.entries[0].paths[0].parent) for dataset in made)
    assert again == first
    assert other["annotations.jsonl"] != first["annotations.jsonl"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == NAMES


def test_complete_folder_is_reused_and_another_never_touched(demo, tmp_path):
    folder = demo.entries[0].paths[0].parent
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    assert make_demo_dataset(folder, num_samples=40, seed=7) == demo
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
    with pytest.raises(ConfigError, match="holds something else"):
        make_demo_dataset(folder, num_samples=41, seed=7)
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="no demo dataset"):
        make_demo_dataset(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(n, marks=OTHERS) for n in FAMILIES if n not in FEW)])
def test_made_for_a_family_it_has_its_tokens_and_no_media_it_does_not_take(name, tmp_path):
    rules = load_family(name, {}, {})
    done = list[tuple[int, int]]()
    made = make_demo_dataset(
        tmp_path / "demo", num_samples=16, max_llm_tokens=16384, rules=rules, at=lambda _, *at: done.append(at)
    )
    assert done == [(number, 16) for number in range(17)]
    shapes, quarantined = profile_shard(made, rules, 0, 1)
    assert (len(shapes), quarantined) == (16, [])
    kinds = {item.kind for shape in shapes for item in shape.items}
    assert kinds == set(rules.media_tokens)
    assert make_demo_dataset(tmp_path / "demo", num_samples=16, max_llm_tokens=16384, rules=rules) == made
    other = load_family("internvl" if name != "internvl" else "qwen2_audio", {}, {})
    with pytest.raises(ConfigError, match="holds something else"):
        make_demo_dataset(tmp_path / "demo", num_samples=16, rules=other)


def test_interrupted_build_leaves_nothing(tmp_path):
    def interrupt(message: str) -> None:
        if "tokenizer" in message:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_demo_dataset(tmp_path / "demo", num_samples=4, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_named(tmp_path, monkeypatch):
    version = importlib.metadata.version

    def without_pygame(package: str) -> str:
        if package == "pygame-ce":
            raise importlib.metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(importlib.metadata, "version", without_pygame)
    with pytest.raises(ConfigError, match="pygame-ce") as caught:
        make_demo_dataset(tmp_path / "demo")
    assert caught.value.hint == "pip install 'dflop[demo]'"

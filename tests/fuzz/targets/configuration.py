"""Configurations and models: YAML, `--set`, mixtures, the files a configuration names, `config.json` of a model."""

import contextlib
import functools
import io
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from ruamel.yaml import YAML

from dflop import resources
from dflop.config import annotated, dump_config, load_config, load_mixture, load_problems, load_with_origins, shown_keys
from dflop.models import FAMILIES, load_family
from dflop.models.hub import TYPES, read_hub_model
from dflop.models.media import MediaHeader
from dflop.run.directory import dataset_ref
from dflop.steps.preflight import problems
from tests.fuzz import hostile
from tests.fuzz.target import Target, attempt, check_words

_YAML_WORDS = (
    "&a", "*a", "<<: *a", "? ", "- ", "!!python/object/apply:os.system [id]", "!!binary aGk=", "!!timestamp 2001-01-01",
    "---\n", "{", "[", "|\n  x", ">", "\t", "#", ": ", "0o7", "1:30", "2001-13-45", "[" * 200, "{a: " * 200, "- " * 400,
    "a: &a [*a]\n", "!!float .nan", ".inf", "\ufeff", '"\\ud800"', "1e999", "9" * 5000, "0x" + "f" * 9000, "{1: 2}",
    "2001-01-01", "{<<: 3}", "[&a [1, 1], &b [*a, *a], &c [*b, *b], &d [*c, *c]]",
)  # fmt: skip
_PATHS = ("model.hf_config", "model.hf_config.text_config.num_hidden_layers", "model.hf_config.a", "model.media.b",
          "a..b", ".", "=", "")  # fmt: skip
_MIXTURE = {"datasets": [
    {"path": "a.jsonl", "sampling_strategy": "first:3", "weight": 2.0, "media_root": "m"},
    {"json_path": "{a,b}.jsonl", "sampling_strategy": "random:5%", "weight": 1},
]}  # fmt: skip


@functools.cache
def _configs() -> tuple[dict[str, Any], ...]:
    """Configurations of people, each in one file, and none of the defaults."""
    folder = resources.path("configs")
    files = [folder / "demo.yaml", folder / "staged.yaml", *sorted((folder / "examples").glob("*.yaml"))[::3]]
    return tuple(load_config(file).model_dump(mode="json", exclude_unset=True) for file in files)


def _as_yaml(values: Any) -> str:
    text = io.StringIO()
    YAML(typ="safe", pure=True).dump(values, text)
    return text.getvalue()


def _as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _file(folder: Path, example: bytes, overrides: tuple[str, ...] = ()) -> None:
    """All that is asked of a configuration file before anything runs."""
    path, again = folder / "run.yaml", folder / "again.yaml"
    path.write_bytes(example)
    if wrong := load_problems(path, overrides):
        for problem in wrong:
            check_words(problem)
        return
    loaded = load_with_origins(path, overrides)
    config = loaded.config
    for text in (dump_config(config), annotated(loaded)):
        again.write_text(text, encoding="utf-8")
        assert load_config(again) == config, "what is written down or shown is not what was read"
    assert config.key
    assert shown_keys(loaded)
    config.cluster.spec()
    attempt(dataset_ref, config)
    for found in problems(config, loaded.origins):
        check_words(found.error)


def _mixture(folder: Path, example: Any) -> None:
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    path, config = folder / "mix.yaml", folder / "run.yaml"
    config.write_text(_as_yaml(_configs()[0]))
    path.write_bytes(_as_bytes(_as_yaml(example)))
    attempt(load_mixture, path)
    overrides = (f"dataset.annotations={path}", f"dataset.media_root={folder}", "dataset.demo=false")
    ref = attempt(dataset_ref, load_config(config, overrides))
    rows = attempt(ref.open) if ref else None
    assert rows is None or len(rows.weights()) == len(rows)


@functools.cache
def _models() -> tuple[dict[str, Any], ...]:
    files = sorted((resources.path("configs") / "models").glob("*.yaml"))
    found = [YAML(typ="safe", pure=True).load(file.read_text(encoding="utf-8")) for file in files]
    qwen = {"max_pixels": 3136}  # a key that the family reads and these files leave to its default
    return tuple(
        {"family": one["family"], "hf_config": one.get("hf_config", {}),
         "media": {**(qwen if "qwen" in one["family"] else {}), **one.get("media", {})}} for one in found
    )  # fmt: skip


def _hub_configs() -> list[dict[str, Any]]:
    return [
        {"model_type": kind, **({section: model["hf_config"]} if section else model["hf_config"])}
        for model in _models() for kind, (family, section) in TYPES.items() if family == model["family"]
    ]  # fmt: skip


def _section(_folder: Path, example: dict[str, Any]) -> None:
    types = {"family": str, "hf_config": dict, "media": dict}
    if all(isinstance(example.get(key), kind) for key, kind in types.items()) and example["family"] in FAMILIES:
        _ask(attempt(load_family, *map(example.get, types)))  # a configuration refuses all else


def _hub(folder: Path, example: tuple[bytes, bytes]) -> None:
    for name, content in zip(("config.json", "preprocessor_config.json"), example, strict=True):
        (folder / name).write_bytes(content)
    found = attempt(read_hub_model, folder / "config.json")
    assert found is None or found.num_params > 0
    _ask(found and found.family)


def _ask(family: Any) -> None:
    """What planning and profiling of data ask of a family."""
    if family is None:
        return
    assert family.rules_key
    for spec in attempt(family.specs) or ():
        assert min(spec.num_layers, *(kind.num_params for kind in spec.kinds)) > 0
    assert family.max_level < 100
    for kind in family.media_tokens:
        with contextlib.suppress(ValueError):
            assert family.place(MediaHeader(kind, 640, 480, 8, 4.0)).num_rows > 0


_CONFIGS = [_as_yaml(one) for one in _configs()]
_BYTES = hostile.broken_bytes(*map(str.encode, _CONFIGS)) | st.binary(max_size=60)
_TEXTS = hostile.broken_text(_CONFIGS, _YAML_WORDS).map(_as_bytes)
_VALUES = hostile.one_broken(_configs()).map(_as_yaml).map(_as_bytes)
_WORDS = hostile.TEXTS | st.sampled_from(_YAML_WORDS) | hostile.SCALARS.map(repr)
_SHOWN = [shown.key for shown in shown_keys(load_with_origins(resources.path("configs") / "demo.yaml"))]
_SET = st.tuples(st.sampled_from((*_PATHS, *_SHOWN)) | hostile.TEXTS, st.sampled_from(("=", "=", "=", "")), _WORDS)
_NUMBERS = st.one_of(hostile.INTEGERS, hostile.FLOATS, st.lists(hostile.INTEGERS, max_size=3), hostile.VALUES)
_PROCESSOR = {"min_pixels": 3136, "max_pixels": 1003520, "size": {"shortest_edge": 3136, "longest_edge": 12845056},
              "min_patches": 1}  # fmt: skip
_PROCESSORS = st.just(hostile.as_json(_PROCESSOR)) | hostile.broken_json(_PROCESSOR, values=_NUMBERS)
_HUB = st.tuples(hostile.broken_json(*_hub_configs(), values=_NUMBERS), _PROCESSORS)
TARGETS = (
    Target("config-bytes", "bytes of real configurations broken", _BYTES, _file),
    Target("config-text", "YAML of real configurations cut up, with tags, anchors and aliases", _TEXTS, _file),
    Target("config-values", "real configurations with values of any type and size", _VALUES, _file),
    Target("config-set", "`--set` words", st.lists(_SET.map("".join), min_size=1, max_size=3),
           lambda folder, words: _file(folder, _CONFIGS[0].encode(), tuple(words))),
    Target("mixture", "mixtures with values of any type", hostile.broken(_MIXTURE), _mixture),
    Target("model-section", "`model.hf_config` and `model.media` with values of any type",
           hostile.one_broken(_models(), _NUMBERS), _section),
    Target("model-config-json", "`config.json` and `preprocessor_config.json` of a model", _HUB, _hub, quick=4),
)  # fmt: skip

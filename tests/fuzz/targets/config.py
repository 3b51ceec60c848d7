"""Configurations: YAML as bytes and as values, `--set`, mixtures, the files a configuration names."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from ruamel.yaml import YAML

from dflop import resources
from dflop.config import (
    Loaded,
    annotated,
    dump_config,
    load_config,
    load_mixture,
    load_problems,
    load_with_origins,
    shown_keys,
)
from dflop.jobs.preflight import problems
from dflop.jobs.rundir import dataset_ref
from tests.fuzz import hostile
from tests.fuzz.target import Target, attempt, check_words

_YAML_WORDS = (
    "&a", "*a", "<<: *a", "? ", "- ", "!!python/object/apply:os.system [id]", "!!binary aGk=", "!!timestamp 2001-01-01",
    "---\n", "...\n", "%YAML 1.1\n", "{", "[", "|\n  x", ">", "\t", "#", ": ", "~", "!!set {a}", "0o7", "1:30",
    "2001-13-45",
    "[" * 200, "{a: " * 200, "- " * 400, "a: &a [*a]\n", "!!float .nan", ".inf", "!!int 1__0", "\ufeff",
    "!<tag:yaml.org,2002:str>",
    '"\\0"', '"\\ud800"', '"a\\nb"', ".nan", "1e999", "9" * 5000, "0x" + "f" * 9000, "{? [1] : 2}", "{1: 2}",
    "&a [*a]", "!!float a",
    "!!omap [a]", "[&a [1, 1], &b [*a, *a], &c [*b, *b], &d [*c, *c]]", "{<<: 3}", "2001-01-01", "!!set {a}",
)  # fmt: skip
_PATHS = ("name", "model.family", "model.hf_config.text_config.num_hidden_layers", "model.media.max_pixels",
"train.num_steps",
          "train.learning_rate", "cluster", "cluster.slurm.extra", "cluster.num_nodes", "dataset.annotations",
          "plan.layouts",
          "dataset.tokenizer", "dataset.media_root", "dataset.chat_template", "model.hf_config.text_config",
          "model.hf_config.a",
          "model.hf_config.vision_config.depth", "model.weights", "train.metrics_dir",
          "cluster.memory_per_process_gib", "stages", "model", "model.frozen", "store", "plan.microbatch_choices",
          "a..b", ".", "=", "")  # fmt: skip


@functools.cache
def real_texts() -> tuple[str, ...]:
    """Configurations of people, each in one file, and none of the defaults."""
    return tuple(as_yaml(values) for values in real_values())


@functools.cache
def real_values() -> tuple[dict[str, Any], ...]:
    folder = resources.path("configs")
    files = [folder / "demo.yaml", folder / "staged.yaml", *sorted((folder / "examples").glob("*.yaml"))[::3]]
    return tuple(load_config(file).model_dump(mode="json", exclude_unset=True) for file in files)


def as_yaml(values: Any) -> str:
    """Any plain values as YAML, surrogates included."""
    text = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.dump(values, text)
    return text.getvalue()


def _values() -> st.SearchStrategy[Any]:
    return st.sampled_from(real_values()).flatmap(hostile.broken)


def _texts() -> st.SearchStrategy[str]:
    return hostile.broken_text(real_texts(), _YAML_WORDS)


def _bytes() -> st.SearchStrategy[bytes]:
    return hostile.broken_bytes([text.encode() for text in real_texts()]) | st.binary(max_size=60)


def _overrides() -> st.SearchStrategy[list[str]]:
    key = st.sampled_from(_PATHS) | hostile.TEXTS
    value = hostile.TEXTS | st.sampled_from(_YAML_WORDS) | hostile.SCALARS.map(repr)
    one = st.tuples(key, st.sampled_from(("=", "=", "=", "")), value).map("".join)
    return st.lists(one, min_size=1, max_size=3)


def _mixtures() -> st.SearchStrategy[Any]:
    sound = {"datasets": [{"path": "a.jsonl", "sampling_strategy": "first:3", "weight": 2.0, "media_root": "m"},
                          {"json_path": "{a,b}.jsonl", "sampling_strategy": "random:5%", "weight": 1}]}  # fmt: skip
    return hostile.broken(sound)


def try_file(path: Path, overrides: tuple[str, ...] = ()) -> None:
    """All that is asked of a configuration file before anything runs."""
    wrong = load_problems(path, overrides)
    for problem in wrong:
        check_words(problem)
    if not wrong:
        _look_at(load_with_origins(path, overrides), path)


def _look_at(loaded: Loaded, path: Path) -> None:
    config = loaded.config
    again = path.with_name("again.yaml")
    again.write_text(dump_config(config), encoding="utf-8")
    assert load_config(again) == config, "what is written down is not what was read"
    again.write_text(annotated(loaded), encoding="utf-8")
    assert load_config(again) == config, "what is shown is not what was read"
    assert config.key
    assert shown_keys(loaded)
    config.cluster.spec()
    attempt(dataset_ref, config)
    for problem in problems(config, loaded.origins):
        check_words(problem.error)


def _file(write: Callable[[Path, Any], None]) -> Callable[[Path], Callable[[Any], None]]:
    def prepare(folder: Path) -> Callable[[Any], None]:
        path = folder / "run.yaml"

        def check(example: Any) -> None:
            write(path, example)
            try_file(path)

        return check

    return prepare


def _with_overrides(folder: Path) -> Callable[[Any], None]:
    path = folder / "run.yaml"
    path.write_text(real_texts()[0], encoding="utf-8")
    return lambda example: try_file(path, tuple(example))


def _as_mixture(folder: Path) -> Callable[[Any], None]:
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    path, config = folder / "mix.yaml", folder / "run.yaml"
    config.write_text(real_texts()[0], encoding="utf-8")
    overrides = (f"dataset.annotations={path}", f"dataset.media_root={folder}", "dataset.demo=false")

    def check(example: Any) -> None:
        path.write_text(as_yaml(example), encoding="utf-8", errors="surrogatepass")
        attempt(load_mixture, path)
        ref = attempt(dataset_ref, load_config(config, overrides))
        rows = attempt(ref.open) if ref else None
        if rows is not None:
            assert len(rows.weights()) == len(rows)

    return check


TARGETS = (
    Target(
        "config-bytes", "bytes of real configurations broken", _bytes, _file(lambda p, e: p.write_bytes(e) and None)
    ),
    Target(
        "config-text",
        "YAML of real configurations cut up, with tags, anchors and aliases",
        _texts,
        _file(lambda p, e: p.write_text(e, encoding="utf-8", errors="surrogatepass") and None),
    ),
    Target(
        "config-values",
        "real configurations with values of any type and size",
        _values,
        _file(lambda p, e: p.write_text(as_yaml(e), encoding="utf-8", errors="surrogatepass") and None),
    ),
    Target("config-set", "`--set` words", _overrides, _with_overrides),
    Target("mixture", "mixtures with values of any type", _mixtures, _as_mixture),
)

"""Where values come from: lines of keys, `config show`, several errors at once, and the schema for editors."""

import json
from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML

from dflop import resources
from dflop.config import annotated, json_schema, load_config, load_problems, load_with_origins, shown_keys
from dflop.config.places import composed, lines_of
from dflop.errors import ConfigError
from tests.test_config import BASE

CONFIGS = resources.path("configs")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a: 1\nb:\n  c: 2\n", {("a",): 1, ("b",): 2, ("b", "c"): 3}),
        ("# note\n\na: {b: 1,\n    c: [2,\n 3]}\n",
         {("a",): 3, ("a", "b"): 3, ("a", "c"): 4, ("a", "c", "0"): 4, ("a", "c", "1"): 5}),
        ("x: &x {a: 1}\ny:\n  <<: *x\n  b: 2\n", {("x",): 1, ("x", "a"): 1, ("y",): 2, ("y", "a"): 1, ("y", "b"): 4}),
        ("x: &x {a: 1}\ny: {a: 5, <<: *x}\n", {("x",): 1, ("x", "a"): 1, ("y",): 2, ("y", "a"): 2}),
        ("", {}),
    ],
)  # fmt: skip
def test_lines_of_keys(text, lines):
    assert lines_of(composed(text, YAML(typ="safe", pure=True))) == lines


def test_every_value_is_shown_with_its_origin(config_file):
    loaded = load_with_origins(config_file, ["train.num_steps=7", "cluster.slurm.extra={account: a}"])
    shown = {key.key: key for key in shown_keys(loaded)}
    assert shown["name"].origin == f"{config_file}:1"
    assert shown["cluster.memory_per_process_gib"].origin == f"{config_file.parent}/clusters/here.yaml:3"
    assert shown["model.hf_config.text_config.hidden_size"][1:] == (64, f"{config_file}:2")
    assert shown["train.num_steps"][1:] == (7, "--set")
    assert shown["cluster.slurm.extra.account"].origin == "--set"
    assert shown["train.warmup_steps"][1:] == (4, "default")
    assert shown["plan.share_ranks"][1:] == ([False, True], "default")


def test_what_is_shown_is_a_configuration(config_file, tmp_path):
    setup = json.dumps(["module load cuda # 12", "a\nb", "x" * 300])
    loaded = load_with_origins(config_file, ["train.num_steps=7", f"cluster.slurm.setup={setup}"])
    text = annotated(loaded)
    (tmp_path / "again.yaml").write_text(text)
    assert load_config(tmp_path / "again.yaml") == loaded.config
    lines = text.splitlines()
    assert any(line.startswith("  num_steps: 7 ") and line.endswith("# --set") for line in lines)
    assert any(line.startswith("name: small ") and line.endswith(f"# {config_file}:1") for line in lines)
    assert any(line.split()[0] == "setup:" and line.endswith("# --set") for line in lines)


def test_a_section_that_another_file_replaces_has_that_files_lines(config_file, tmp_path):
    (tmp_path / "other.yaml").write_text("\n\nname: other\nnum_processes_per_node: 7\n")
    (error,) = load_problems(config_file, ["cluster=other.yaml"])
    assert error.where == f"{tmp_path / 'other.yaml'}:1: memory_per_process_gib"
    with pytest.raises(ConfigError) as caught:
        load_config(config_file, ["cluster=another.yaml"])
    assert caught.value.where == "--set cluster"


def test_all_problems_are_found_at_once(config_file):
    config_file.write_text(BASE + "trian: {}\nplan: {top: 0, horizon: 2}\n")
    found = load_problems(config_file, ["train.num_steps=0"])
    assert {error.where.removeprefix(f"{config_file}:") for error in found} == {
        "8: trian", "9: plan.top", "9: plan.horizon", "--set train.num_steps",
    }  # fmt: skip
    assert all(error.what.startswith("unknown key") for error in found[:2])
    assert load_problems(config_file.parent / "none.yaml")[0].what.startswith("cannot read")
    config_file.write_text(BASE)
    assert load_problems(config_file) == []


def kind_of(path: Path) -> str:
    folder = path.parent.name
    return {"models": "model", "clusters": "cluster", "datasets": "dataset"}.get(folder, "run")


def test_the_schema_takes_every_shipped_file():
    for path in CONFIGS.rglob("*.yaml"):
        if path.name != "mixture_example.yaml":
            jsonschema.validate(YAML(typ="safe").load(path.read_text()), json_schema(kind_of(path)))

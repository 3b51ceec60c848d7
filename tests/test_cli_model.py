"""`dflop model check` as a person meets it: tables or rows on stdout, the rest on stderr, its exit code."""

import json
from pathlib import Path

import pytest

from dflop.models import cache_of_models
from dflop.models.generic.exactness import KeptCheck, check_file
from dflop.models.generic.facts import kept
from dflop.profile.hardware import software_name
from tests.models.generic.configs import config_of
from tests.test_cli import dflop


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config_of("qwen3_5").save_pretrained(tmp_path)
    for name in ("processor_config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def kept_in(store: Path, folder: Path) -> KeptCheck | None:
    return kept(KeptCheck, check_file(cache_of_models(store), json.loads((folder / "config.json").read_text()), folder))


def test_a_model_that_no_family_knows_is_described_and_exact_and_the_result_is_kept(folder):
    done = dflop("model", "check", str(folder), "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    by_part = {part: [row for row in rows if row["part"] == part] for part in {row["part"] for row in rows}}
    assert [(row["name"], row["num"]) for row in by_part["layers"]] == [("gated delta", 3), ("full attention", 1)]
    layers = sum(row["num"] * row["num_params"] for row in by_part["layers"])
    (entry,), (exit_,), (model,) = by_part["entry"], by_part["exit"], by_part["model"]
    (encoder,) = by_part["encoder"]
    assert model["num_params"] == layers + sum(row["num_params"] for row in (entry, exit_, encoder))
    assert {row["name"]: row["error"] is not None for row in by_part["exactness"]} == {
        "text": True, "image": True, "video": True,
    }  # fmt: skip
    assert all(row["error"] <= 1e-5 for row in by_part["exactness"] if row["error"] is not None)
    factors = {row["name"]: row["factor"] for row in by_part["kernel"]}
    assert set(factors) == {"3D convolution of patches", "fla", "causal_conv1d", "attention", "flash_attn"}
    assert factors["3D convolution of patches"] > 0
    assert by_part["tokens"][0]["detail"].startswith("no processor")  # its files are empty
    result = kept_in(folder / ".dflop" / "store", folder)
    errors = {row["name"]: row["error"] for row in by_part["exactness"]}
    assert {of.medium: of.error for of in result.exactness.checks} == errors
    assert result.software == software_name()
    assert result.refused == (("every medium", by_part["tokens"][0]["detail"]),)
    assert "kept for reports: .dflop/store/cache/models/check-" in done.stderr
    assert "torchao" not in done.stderr


def test_tables_say_what_is_not_checked_also_where_the_result_cannot_be_kept(folder):
    no_store = folder / "config.json" / "store"
    done = dflop("model", "check", str(folder), "--store", str(no_store), cwd=folder, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "3x gated delta" in done.stdout
    assert "not checked" in done.stdout
    assert "not checked: no processor" in done.stdout
    assert f"reports will not have this result: cannot write into `{no_store}`: " in done.stderr


def test_a_folder_without_such_a_model_ends_with_2_and_says_what_to_do(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    done = dflop("model", "check", str(folder), cwd=folder)
    assert done.returncode == 2
    assert done.stdout == ""
    what, where, hint = done.stderr.splitlines()
    assert what == "dflop: `model_type`: a `qwen3` takes text only"
    assert "config.json" in where
    assert "encoder" in hint


def test_stages_that_differ_end_with_1(folder, monkeypatch, capsys):
    from dflop.cli import model
    from dflop.models.generic import packed

    monkeypatch.setattr(packed, "per_sample", lambda forward, lengths, *args, **kwargs: forward(*args, **kwargs))
    with pytest.raises(SystemExit, match="1"):
        model.check(folder, as_json=True, store=folder / "store")
    assert not kept_in(folder / "store", folder).exactness.is_exact
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert next(row["error"] for row in rows if (row["part"], row["name"]) == ("exactness", "text")) > 0.01

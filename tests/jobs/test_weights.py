"""Whole jobs: what one run exports, another run starts from, and losses tell whether it is the same model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

from dflop.config import load_config
from dflop.errors import ConfigError, TrainError
from dflop.jobs.weights import export_run, first_weights, read_trained
from dflop.run.directory import RunDir, family_of, tokenizer_of
from dflop.train.checkpoint_state import read_model
from tests.jobs.training import fresh, losses_of, set_config
from tests.jobs.training import train as train_to_the_end
from tests.test_cli import dflop

NUM_STEPS = 3

pytestmark = [pytest.mark.lane("jobs"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def train(planned, tmp_path_factory) -> Callable[..., RunDir]:
    """Trains a copy of the run under other settings to its end."""

    def run(*overrides: str) -> RunDir:
        copy = fresh(planned, tmp_path_factory.mktemp("run"))
        set_config(copy, f"train.num_steps={NUM_STEPS}", "train.checkpoint_every=2", *overrides)
        train_to_the_end(copy)
        return copy

    return run


@pytest.fixture(scope="module")
def trained(train) -> RunDir:
    """Steps too small to change a loss."""
    return train("train.learning_rate=1e-20", "train.weight_decay=0")


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    out = tmp_path_factory.mktemp("model") / "out"
    done = dflop("export", trained.path, "--out", out, cwd=out.parent)
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    assert f"model after {NUM_STEPS} steps" in done.stderr
    assert "not trained, as the data has no items for it: audio" in done.stderr
    assert os.listdir(out.parent) == ["out"]
    made = {"processor_config.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    assert {p.name for p in out.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json", *made}
    return out


def test_a_run_starts_from_what_another_exported(trained, exported, train):
    vocabulary = tokenizer_of(trained.config()).vocab_size
    unchanged = ("train.learning_rate=1e-20", "train.weight_decay=0", "model.seed=1")
    other = train(*unchanged)
    started = train(
        *unchanged, f"model.weights={exported}", f"model.hf_config.text_config.vocab_size={vocabulary}"
    )  # fmt: skip
    losses = losses_of(trained)
    assert losses_of(started) == pytest.approx(losses, rel=1e-6)
    assert losses_of(other) != pytest.approx(losses, rel=1e-4)


def test_a_damaged_checkpoint_is_not_exported(trained, tmp_path, capsys):
    run, said = fresh(trained, tmp_path), []
    newest, older = sorted(run.checkpoints.glob("step-*"), reverse=True)
    (newest / "__0_0.distcp").write_bytes(b"")
    seen = list[tuple[str, int, int]]()
    assert export_run(run, tmp_path / "out", said.append, lambda *at: seen.append(at), max_shard_bytes=1_000_000) == 2
    for what in {what for what, _, _ in seen}:
        counts = [done for name, done, _ in seen if name == what]
        assert counts == list(range(seen[-1][2] + 1 if "files" in what else len(counts)))
    assert [seen[0][0][:7], seen[-1][0][:7]] == ["reading", "writing"]
    assert all(done == total for what, done, total in (seen[-1],))
    assert not capsys.readouterr().err, "transformers draws no bar of its own"
    assert "skipped damaged checkpoint: step-00000003: __0_0.distcp has 0 bytes" in said[0]
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    (older / "manifest.json").unlink()
    with pytest.raises(TrainError, match="every checkpoint is damaged"):
        export_run(run, tmp_path / "other", said.append)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "runs", "store"]


def test_the_best_checkpoint_is_exported_where_one_is_kept(trained, tmp_path):
    run = fresh(trained, tmp_path)
    newest, older = sorted(run.checkpoints.glob("step-*"), reverse=True)
    with pytest.raises(ConfigError, match="keeps no checkpoint as its best"):
        export_run(run, tmp_path / "out", print, is_best=True)
    content = json.loads((newest / "manifest.json").read_text())
    content["meta"]["best"] = older.name
    (newest / "manifest.json").write_text(json.dumps(content))
    assert export_run(run, tmp_path / "out", print, is_best=True) == 2
    assert export_run(run, tmp_path / "newest", print) == 3


def test_the_average_of_the_weights_is_exported_where_one_is_kept(trained, train, tmp_path):
    with pytest.raises(ConfigError, match="no average of the weights"):
        export_run(trained, tmp_path / "none", print, is_average=True)
    often = ("train.checkpoint_every=1", "train.keep_checkpoints=9")
    run = train("train.ema_decay=0.75", "train.learning_rate=0.01", *often)
    tokenizer = tokenizer_of(run.config())
    first = first_weights(run.config(), family_of(run.config(), tokenizer.vocab_size), tokenizer)
    steps = [read_model(folder) for folder in sorted(run.checkpoints.glob("step-*"))]
    assert len(steps) == NUM_STEPS
    found = read_trained(run, print, is_average=True).weights
    for name in steps[-1]:
        expected = first.weights.read(name)
        for step in steps:
            expected = 0.75 * expected + 0.25 * step[name]
        torch.testing.assert_close(found[name], expected)
    assert any(not torch.equal(found[name], weight) for name, weight in steps[-1].items())


def test_what_cannot_be_exported_or_started_from_is_said(planned, trained, exported, tmp_path):
    no_checkpoint = fresh(planned, tmp_path / "none")
    with pytest.raises(ConfigError, match="the run has no checkpoint yet"):
        export_run(no_checkpoint, tmp_path / "x", print)
    assert not (tmp_path / "x").exists()
    with pytest.raises(ConfigError, match="already exists"):
        export_run(trained, exported, print)
    too_small = (f"model.weights={exported}", "model.hf_config.text_config.vocab_size=64")
    config = load_config(planned.config_file, too_small)
    tokenizer = tokenizer_of(config)
    family = family_of(config, tokenizer.vocab_size)
    with pytest.raises(ConfigError, match=f"{tokenizer.vocab_size} tokens, the weights have room for 64"):
        first_weights(config, family, tokenizer)


def test_adapters_of_a_base_are_merged_into_it_and_into_no_other(exported, trained, train, tmp_path):
    vocabulary = tokenizer_of(trained.config()).vocab_size
    base = shutil.copytree(exported, tmp_path / "base")
    run = train(
        f"model.weights={base}", f"model.hf_config.text_config.vocab_size={vocabulary}", "model.frozen=[vision]",
        "train.lora={targets: {llm: [q_proj, down_proj]}, rank: 4}", "train.learning_rate=0.01",
    )  # fmt: skip
    losses = losses_of(run)
    assert losses[0] == pytest.approx(losses_of(trained)[0], rel=1e-5), "adapters begin with nothing"
    assert losses[NUM_STEPS - 1] != pytest.approx(losses_of(trained)[NUM_STEPS - 1], rel=1e-4)
    assert export_run(run, tmp_path / "out", print) == NUM_STEPS
    old, new = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    assert old.keys() == new.keys()
    changed = {key for key in old if not torch.equal(old[key], new[key])}
    assert changed == {key for key in changed if key.endswith(("q_proj.weight", "down_proj.weight"))}
    assert len(changed) == 2 * family_of(run.config()).configs["llm"]["num_hidden_layers"]
    done = dflop("export", run.path, "--out", tmp_path / "adapters", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {p.name for p in (tmp_path / "adapters").iterdir()}
    assert not (tmp_path / "adapters" / "config.json").exists()
    alone = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert len(alone) == 2 * len(changed)
    file = base / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(TrainError, match="trained with another base"):
        export_run(run, tmp_path / "other", print)

from types import SimpleNamespace

import pytest

from dflop.config import Origins
from dflop.errors import ConfigError, InfeasiblePlanError
from dflop.models.family import Family
from dflop.records import LLM
from dflop.run.directory import family_of
from dflop.steps.preflight import check_expert_parallel, modules_named, preflight, remarks
from tests.jobs.configs import make_config, make_dataset, write_config

ALL = ("vision", "audio", LLM)


def check(folder, *overrides):
    preflight(make_config(folder, *overrides), folder / "run.yaml")


def test_a_sound_configuration_passes_and_nothing_is_created(tmp_path):
    check(tmp_path, "dataset.demo=true")  # may still be missing
    make_dataset(tmp_path)
    write_config(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    check(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_that_is_planned_for_and_not_trained_starts_no_run(tmp_path, monkeypatch):
    make_dataset(tmp_path)
    monkeypatch.setattr(Family, "untrained", "layers take per-layer embeddings")
    with pytest.raises(
        ConfigError, match="are planned for and not trained: layers take per-layer embeddings"
    ) as caught:
        check(tmp_path)
    assert "model" in caught.value.where


def test_context_parallelism_that_the_model_does_not_take_is_refused(tmp_path, monkeypatch):
    make_dataset(tmp_path)
    monkeypatch.setattr(Family, "whole_samples", "a layer carries a state along the tokens")
    check(tmp_path, "plan.context_parallel=[1]")
    with pytest.raises(ConfigError, match=r"parallelism of 2, 4 for .*: a layer carries a state") as caught:
        check(tmp_path, "plan.context_parallel=[1, 2, 4]")
    assert "plan.context_parallel" in caught.value.where


@pytest.mark.parametrize(
    ("override", "what", "hint"),
    [
        (
            "plan.context_parallel=[16]",
            "16: ranks that share samples are of one node, which has",
            "degrees that divide",
        ),
        ("plan.expert_parallel=[1, 8]", "expert parallelism of 8 for .*: its layers have no experts", "valid: 1"),
    ],
)
def test_degrees_that_no_plan_can_have_are_refused(override, what, hint, tmp_path):
    make_dataset(tmp_path)
    with pytest.raises(ConfigError, match=what) as caught:
        check(tmp_path, override)
    assert override.partition("=")[0] in caught.value.where
    assert hint in caught.value.hint


def test_experts_are_shared_out_evenly():
    class WithExperts:
        name = "moe"

        def specs(self):
            return (SimpleNamespace(module=LLM, ep_choices=(1, 2, 4, 8)),)

    config = SimpleNamespace(plan=SimpleNamespace(expert_parallel=(3, 8)))
    with pytest.raises(ConfigError, match="of 3 for `moe`: ranks share out all experts of a layer evenly") as caught:
        check_expert_parallel(config, WithExperts())
    assert caught.value.hint == "valid: 1, 2, 4, 8"


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ((), "169.0 GiB"),
        (("model.frozen=[llm]",), "69.7 GiB"),
        (("model.frozen=[vision.tower, llm]",), "32.9 GiB"),
        (("model.frozen=[vision.tower]", "train.lora={targets: {llm: [q_proj]}}"), "32.9 GiB"),
        (("cluster.memory_per_process_gib=60",), ""),
        (("cluster.num_nodes=64",), ""),
    ],
)
def test_a_model_that_no_memory_holds_is_a_remark_and_so_are_random_weights(tmp_path, overrides, needed):
    config = make_config(tmp_path, *overrides)
    random, *rest = remarks(config, Origins(tmp_path / "run.yaml"))
    assert random.what == "weights are random"
    assert [f"no plan fits, as weights, gradients and optimizer take {needed}" in one.what for one in rest] == [
        True
    ] * bool(needed)
    given = config.model_copy(update={"model": config.model.model_copy(update={"weights": tmp_path})})
    assert len(list(remarks(given, Origins(tmp_path / "run.yaml")))) == len(rest)


@pytest.mark.parametrize("key", ["annotations", "media_root", "tokenizer"])
def test_missing_files_are_named_with_their_key(tmp_path, key):
    make_dataset(tmp_path)
    with pytest.raises(ConfigError, match="`/nowhere/at/all` does not exist") as caught:
        check(tmp_path, f"dataset.{key}=/nowhere/at/all")
    assert (caught.value.where, caught.value.exit_code) == (f"{tmp_path / 'run.yaml'}: dataset.{key}", 2)
    (tmp_path / "data" / "a.jsonl").write_text('{"prompt": "x", "completion": "y"}')
    check(tmp_path, f"dataset.annotations={tmp_path / 'data'}")
    with pytest.raises(ConfigError, match="no split `test`") as caught:
        check(tmp_path, f"dataset.annotations={tmp_path / 'data'}", "dataset.split=test")
    assert caught.value.where == f"{tmp_path / 'run.yaml'}: dataset.annotations"
    with pytest.raises(ConfigError, match="no weights in") as caught:
        check(tmp_path, f"model.weights={tmp_path}")
    assert caught.value.where == f"{tmp_path / 'run.yaml'}: model.weights"
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    check(tmp_path, f"model.weights={tmp_path}")


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("model.family=llava", "unknown model family `llava`"),
        ("model.media={max_pixel: 1}", "unknown media limit `max_pixel`"),
        ("train.groups=[{targets: [visoin], lr_scale: 0.2}]", "`visoin` names no parameter"),
        ("train.warmup_steps=41", "41 steps of warm-up, and `train` has 40"),
        ("validation={num_samples: 9, every_steps: 41}", "a validation every 41 steps of a run of 40"),
        ("model.frozen=[visio]", "unknown module `visio`"), ("model.frozen=[vision, audio, llm]", "nothing to train"),
        ("stages=[{name: a, num_steps: 2}, {name: a}]", "two stages are named `a`"),
        ("stages=[{name: a, num_steps: 2}, {name: b, num_steps: 2}]", "the last stage takes the remaining steps"),
        ("stages=[{name: a}, {name: b}]", "stage `a` has no number of steps"),
        ("stages=[{name: a, num_steps: 40}, {name: b}]", "no step remains of 40"),
        ("stages=[{name: a, frozen: [vision, audio, llm]}]", "nothing to train"),
        ("train.lora={targets: {visoin: [all-linear]}}", "unknown module `visoin`"),
    ],
)  # fmt: skip
def test_what_no_job_could_run_with_is_refused(tmp_path, override, what):
    make_dataset(tmp_path)
    with pytest.raises(ConfigError, match=what):
        check(tmp_path, override)


@pytest.mark.parametrize(
    ("override", "what", "key"),
    [
        ("model.frozen=[llm]", "`llm` is frozen, and so would its adapters be", "train.lora.targets.llm"),
        (
            "model.frozen=[vision.tower]",
            "`vision.tower` is frozen, which lets the projector",
            "train.lora.targets.vision",
        ),
        ("train.compile=true", "train.lora.dropout is 0.1, and compiled layers", "train.lora.dropout"),
        ("plan.expert_parallel=[1, 2]", r"plan.expert_parallel is \[1, 2\]", "plan.expert_parallel"),
    ],
)
def test_adapters_that_could_not_train_are_refused_with_the_key(tmp_path, override, what, key):
    make_dataset(tmp_path)
    lora = "train.lora={targets: {llm: [q_proj], vision: [all-linear]}, dropout: 0.1}"
    check(tmp_path, lora)
    check(tmp_path, lora, "plan.shard_parameters=[true]")
    check(tmp_path, lora, "stages=[{name: a, num_steps: 2, frozen: [llm]}, {name: b}]")
    with pytest.raises(ConfigError, match=what) as caught:
        check(tmp_path, lora, override)
    assert caught.value.where.endswith(key)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("train.seed=0", "no layer of Qwen2_5OmniThinkerTextModel has experts"),
        ("model.frozen=[llm]", "`llm` is frozen: no router trains"),
        ("train.lora={targets: {llm: [q_proj]}}", "`llm` has adapters: no router trains"),
    ],
)
def test_a_loss_of_routers_is_refused_where_no_router_trains(tmp_path, more, what):
    make_dataset(tmp_path)
    check(tmp_path, more, "train.router_loss=0")
    with pytest.raises(ConfigError, match=f"train.router_loss is 0.01, and {what}") as caught:
        check(tmp_path, more, "train.router_loss=0.01")
    assert caught.value.where.endswith("train.router_loss")


@pytest.mark.parametrize(
    ("override", "key"), [("plan.shard_parameters=[true]", "plan.shard_parameters"),
                          ("model_profile.tp=[2]", "model_profile.tp")],
)  # fmt: skip
def test_muon_is_refused_where_every_plan_would_cut_matrices(tmp_path, override, key):
    make_dataset(tmp_path)
    check(tmp_path, "train.optimizer=muon")
    with pytest.raises(ConfigError, match="which cuts matrices") as caught:
        check(tmp_path, "train.optimizer=muon", override)
    assert caught.value.where.endswith(key)


def test_slurm_needs_sbatch_and_the_name_of_the_hardware(tmp_path, monkeypatch):
    make_dataset(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ConfigError, match="sbatch, which is not on PATH"):
        check(tmp_path, "cluster.backend=slurm")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    with pytest.raises(ConfigError, match=r"cluster\.hardware must be set") as caught:
        check(tmp_path, "cluster.backend=slurm")
    assert caught.value.where.endswith("cluster.hardware")
    check(tmp_path, "cluster.backend=slurm", "cluster.hardware=H200")


def test_modules_are_those_the_annotations_mention_and_of_what_cannot_be_read_only_the_llm_is_sure(tmp_path):
    def named(*overrides):
        config = make_config(tmp_path, *overrides)
        return modules_named(family_of(config), config)

    assert named("dataset.demo=true") == ALL, "not made yet"
    for path in ("data/a.jsonl.gz", "data/mixture.yaml", "data/{000..009}.tar"):
        assert named(f"dataset.annotations={path}") == (LLM,)
    make_dataset(tmp_path)
    for rows, modules in (
        ('{"image": "a.jpg"}', ("vision", LLM)),
        ('{"images": ["a.jpg"]}', ("vision", LLM)),
        ('{"video": "a.mp4"}', ("vision", LLM)),
        ('{"audio": "a.wav"}', ("audio", LLM)),
        ('{"image": "a.jpg"}\n{"audio": "a.wav"}', ALL),
        ('{"conversations": []}', (LLM,)),
    ):
        (tmp_path / "data" / "a.jsonl").write_text(rows)
        assert named() == modules


@pytest.mark.parametrize(("annotations", "num_processes"), [('{"image": 1, "audio": 1}', 2), ('{"image": 1}', 1)])
def test_too_few_processes_end_before_anything_is_profiled(tmp_path, annotations, num_processes):
    make_dataset(tmp_path, annotations)
    each = "cluster.num_processes_per_node={}".format
    with pytest.raises(InfeasiblePlanError, match=f"the cluster has {num_processes}") as caught:
        check(tmp_path, each(num_processes), "plan.share_ranks=[false]")
    assert caught.value.exit_code == 3
    assert "add 1 process(es)" in caught.value.hint
    check(tmp_path, each(num_processes + 1), "plan.share_ranks=[false]")
    check(tmp_path, each(num_processes))  # one chain may hold all modules

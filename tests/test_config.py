import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflop import resources
from dflop.config import Config, ContainerConfig, SlurmConfig, dump_config, load_config, load_mixture
from dflop.config.sbatch_options import ALLOWED, COMPUTED, REFUSED, canonical
from dflop.config.sections import ClusterConfig
from dflop.errors import ConfigError

BASE = """\
name: small
model: {family: qwen2_5_omni_thinker, hf_config: {tie_word_embeddings: false, text_config: {hidden_size: 64}}}
cluster: clusters/here.yaml
dataset:
  annotations: a.jsonl
  media_root: media
  tokenizer: t.json
"""
CLUSTER = """\
name: here
num_processes_per_node: 4
memory_per_process_gib: 2
"""


def error_of(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    return caught.value


LAUGHS = "\n".join(
    ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]", *(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))]
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (LAUGHS, "more than 500000 values, aliases"),
        ("a: &a [*a]", "an alias .* refers to itself"),
        ("[" * 1000, "nested too deeply"),
        ("a: 1\na: 2", "found duplicate key"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: " + "9" * 10_000, "Exceeds the limit"),
        ("a: 2001-99-99", "month must be in"),
        ("a: !!int z", "invalid literal"),
        ("# " + "x" * 10_000_000, "more than 10000000 characters"),
    ],
    ids=["laughs", "turns back", "deep", "twice", "python", "digits", "date", "int", "large"],
)
def test_yaml_that_is_more_than_values_is_refused(config_file, text, told):
    config_file.write_text(text)
    assert re.search(told, error_of(config_file).what)


def test_sections_come_from_files_beside_the_one_that_names_them(config_file, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    config = load_config(config_file)
    assert config.cluster.num_processes_per_node == 4
    assert config.dataset.annotations == Path("a.jsonl"), "paths of data are left to the working directory"
    in_place = BASE.replace(
        "clusters/here.yaml", json.dumps({"num_processes_per_node": 4, "name": "here", "memory_per_process_gib": 2})
    )
    (tmp_path / "in_place.yaml").write_text(in_place)
    assert load_config(tmp_path / "in_place.yaml") == config


def test_shipped_configurations_are_valid():
    assert all(load_config(path).name for path in resources.path("configs").glob("*.yaml"))


@pytest.mark.parametrize(
    ("change", "where", "what", "hint"),
    [
        (("name: small", "name: small\ntrian: {}"), "run.yaml:2: trian", "unknown key", "did you mean `train`?"),
        (("a.jsonl", "a.jsonl\n  max_tokens: 9"), "run.yaml:6: dataset.max_tokens", "unknown key", "`max_llm_tokens`?"),
        (("name: small\n", ""), "run.yaml: name", "missing key `name`", ""),
        (("  tokenizer: t.json\n", ""), "run.yaml:4: dataset.tokenizer", "missing key `tokenizer`", ""),
        (("name: small", "name: s\ntrain: {num_steps: 0}"), "run.yaml:2: train.num_steps", "equal to 1 (got 0)", ""),
        (("name: small", "name: s\ntrain: {learning_rate: .nan}"), "train.learning_rate", "finite number", ""),
        (("name: small", "name: s\nplan: {share_ranks: [in]}"), "plan.share_ranks.0", "a valid boolean", ""),
        (("name: small", "name: s\nplan: {layouts: [split]}"), "plan.layouts", "unknown key", "`plan.share_ranks`"),
    ],
)  # fmt: skip
def test_errors_name_file_and_key(config_file, change, where, what, hint):
    config_file.write_text(BASE.replace(*change))
    error = error_of(config_file)
    assert error.where.endswith(where)
    assert what in error.what
    assert hint in error.hint


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        (("name: here", "name: here\nnum_proceses_per_node: 2"), "here.yaml:2: num_proceses_per_node", "unknown key"),
        (("process_gib: 2", "process_gib: lots"), "here.yaml:3: memory_per_process_gib", "valid number"),
    ],
)  # fmt: skip
def test_errors_in_a_section_file_name_that_file(config_file, change, where, what):
    cluster = config_file.parent / "clusters" / "here.yaml"
    cluster.write_text(CLUSTER.replace(*change))
    error = error_of(config_file)
    assert error.where == f"{config_file.parent / 'clusters'}/{where}"
    assert what in error.what


def test_missing_files_are_named(config_file, tmp_path):
    assert error_of(tmp_path / "none.yaml").where == str(tmp_path / "none.yaml")
    (tmp_path / "clusters" / "here.yaml").unlink()
    error = error_of(config_file)
    assert error.what == "file `clusters/here.yaml` of section `cluster` does not exist"
    assert error.where == f"{config_file}:3: cluster"


@pytest.mark.parametrize(
    ("text", "line"), [("name: a\nmodel: [1, 2\ncluster: x\n", 3), ("a: 1\na: 2\n", 2), ("a: 1\n\tb: 2\n", 2)]
)
def test_bad_yaml_is_located(tmp_path, text, line):
    (tmp_path / "bad.yaml").write_text(text)
    error = error_of(tmp_path / "bad.yaml")
    assert error.what.startswith("not valid YAML: ")
    assert error.where == f"{tmp_path / 'bad.yaml'}:{line}"


def test_overrides_win_and_are_yaml(config_file):
    given = [
        "train.num_steps=7", "plan.microbatch_choices=[2, 3]", "cluster.name=there", "dataset.demo=true",
        "cluster.slurm.extra={account: a1}", "model.hf_config.text_config.hidden_size=128", "train.num_steps=8",
    ]  # fmt: skip
    config = load_config(config_file, given)
    assert config.train.num_steps == 8
    assert config.plan.microbatch_choices == (2, 3)
    assert (config.cluster.name, config.cluster.num_processes_per_node) == ("there", 4)
    assert config.cluster.slurm.extra == {"account": "a1"}
    assert config.model.hf_config == {"tie_word_embeddings": False, "text_config": {"hidden_size": 128}}
    assert config.dataset.demo is True


@pytest.mark.parametrize(
    ("override", "what", "where"),
    [
        ("train.num_steps", "cannot read override `train.num_steps`", "--set"),
        ("name.x=3", "`name` is not a section", "--set name.x=3"),
        ("train.num_steps=[1", "not valid YAML", "--set train.num_steps=[1"),
        ("train.num_stpes=3", "unknown key `num_stpes`", "--set train.num_stpes"),
        ("train={num_steps: no}", "(got 'no')", "--set train.num_steps"),
    ],
)
def test_bad_overrides_name_themselves(config_file, override, what, where):
    error = error_of(config_file, override)
    assert what in error.what
    assert error.where == where


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=5), SCALARS, max_size=3)


def build(**changes) -> Config:
    base = {
        "name": "x",
        "model": {"family": "f", **changes.pop("model", {})},
        "cluster": {"name": "c", "num_processes_per_node": 1, "memory_per_process_gib": 0.5},
        "dataset": {"annotations": "a", "media_root": "m", "tokenizer": "t"},
    }
    return Config.model_validate({**base, **changes})


@settings(max_examples=30)
@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), st.floats(1e-12, 1e6), st.text(max_size=10))
@example({"on": "no", "1e3": "1e3", "x": [1e-5, "0x1", "2026-01-01", "", " a", "#"]}, 1e-05, "\x85 \u2028 - 'x'")
def test_what_is_dumped_is_read_back_with_the_same_key(tmp_path_factory, hf_config, learning_rate, setup_line):
    config = build(model={"hf_config": hf_config}, train={"learning_rate": learning_rate})
    slurm = config.cluster.slurm.model_copy(update={"setup": (setup_line, "module load cuda: 12 # not a comment")})
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"slurm": slurm})})
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    read = load_config(path)
    assert read == config
    assert read.key == config.key


def test_the_example_of_a_slurm_cluster_has_every_key(config_file):
    example = resources.path("configs") / "clusters" / "slurm_example.yaml"
    load_config(config_file, [f"cluster={example}"])
    text = example.read_text()
    assert set(re.findall(r"^  (?:# )?(\w+):", text, re.MULTILINE)) >= set(SlurmConfig.model_fields)
    assert set(re.findall(r"^  #   (\w+):", text, re.MULTILINE)) == set(ContainerConfig.model_fields)


@pytest.mark.parametrize(
    ("slurm", "what"),
    [
        ("extra={output: /tmp/x}", "`output` is computed by dflop"),
        ("extra={no_requeue: ''}", "`no_requeue` is computed by dflop: see cluster.slurm.requeue"),
        ("extra={gpus-per-task: '1'}", "`gpus-per-task` is refused: each task would see one GPU, number 0"),
        ("extra={gpus_per_task: '1'}", "`gpus_per_task` is refused"), ("extra={ntasks-per-gpu: '1'}", "one GPU"),
        ("extra={gpu-bind: single}", "one GPU"), ("extra={G: '8'}", "`G` is refused: jobs differ in size"),
        ("extra={clusters: c2}", "export SLURM_CLUSTERS=NAME"), ("extra={M: c2}", "export SLURM_CLUSTERS=NAME"),
        ("extra={cluster: c2}", "export SLURM_CLUSTERS=NAME"), ("extra={export: NONE}", "see cluster.slurm.setup"),
        ("extra={D: /tmp}", "`D` is computed by dflop"), ("extra={W: ''}", "dflop reads the job's id"),
        ("extra={reservatoin: r}", "no option of sbatch: did you mean `reservation`?"),
        ("srun_args=['-n4']", "`-n4` of srun is refused: it would change which tasks run"),
        ("srun_args=['--gpus-per-task=1']", "one GPU"), ("srun_args=['--export=NONE']", "--export=ALL,NAME=VALUE"),
        ("srun_args=['-l']", "reads the logs"), ("srun_args=['--kill-on-bad-exit=0']", "waited for"),
        ("extra={--mem: 1G}", "`--mem` is no long option of sbatch; leave the dashes out"),
        ('extra={reservation: "a\\nb"}', "one line"), ('partition="a\\nb"', "one line"),
        ("gpus=all", "'gpus-per-node', 'gres' or 'none'"), ("container={image: ''}", "at least 1 character"),
        ("container={image: x, runtime: docker}", "'apptainer' or 'pyxis'"), ("signal_delay_s=0", "(got 0)"),
    ],
)  # fmt: skip
def test_what_would_bend_a_batch_script_is_refused(config_file, slurm, what):
    assert what in error_of(config_file, f"cluster.slurm.{slurm}").what


def test_options_that_sites_need_are_taken_by_any_name(config_file):
    extra = "{w: node1, mem_per_cpu: 4G, gres: 'gpu:2', gpus-per-node: '2', exclusive: '', site-plugin-tmpfs: 1G, "
    extra += "gpu_bind: none, m: 'block:cyclic'}"
    args = "[--cpu-bind=none, --mpi, pmix, '--export=ALL,A=1', --gpu-bind, 'verbose,none', --container-writable]"
    config = load_config(config_file, [f"cluster.slurm.extra={extra}", f"cluster.slurm.srun_args={args}"])
    assert list(config.cluster.slurm.extra) == [
        "nodelist", "mem-per-cpu", "gres", "gpus-per-node", "exclusive", "site-plugin-tmpfs", "gpu-bind",
        "distribution",
    ]  # fmt: skip
    assert len(config.cluster.slurm.srun_args) == 7


def test_every_option_of_sbatch_is_known_once():
    """Names of the manual of Slurm 22.05; tests/slurm asks the sbatch that is installed."""
    manual = Path(__file__).with_name("launch").joinpath("sbatch_options.txt").read_text().split()
    tables = (COMPUTED, REFUSED, ALLOWED)
    known = [name for table in tables for name in table]
    assert len(known) == len(set(known))
    assert set(manual) <= set(known)
    assert [canonical(name) for name in ("M", "gpus_per_task", "workdir", "mem")] == [
        "clusters", "gpus-per-task", "chdir", "mem",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["ranks_per_gpu=2"], "ranks_per_gpu is 2 but device is cpu; it needs cuda"),
        (
            ["device=cuda", "num_processes_per_node=4", "ranks_per_gpu=3"],
            "num_processes_per_node (4) is no multiple of ranks_per_gpu (3)",
        ),
        (["device=cuda", "ranks_per_gpu=0"], "greater than or equal to 1"),
    ],
)
def test_ranks_share_whole_gpus(config_file, overrides, what):
    error = error_of(config_file, *(f"cluster.{override}" for override in overrides))
    assert what in error.what
    assert "cluster" in error.where


def test_an_option_is_said_in_one_place(config_file):
    error = error_of(config_file, "cluster.slurm.account=a", "cluster.slurm.extra={account: b}")
    assert "`account` is also in `extra`" in error.what


def test_the_key_follows_values_not_their_order(config_file):
    key = load_config(config_file).key
    lines = BASE.splitlines()
    config_file.write_text("\n".join([*lines[3:], *lines[:3]]))
    assert load_config(config_file).key == key
    hf_config = "{tie_word_embeddings: false, text_config: {hidden_size: 64}}"
    assert hf_config in BASE
    other_order = "{text_config: {hidden_size: 64}, tie_word_embeddings: false}"
    config_file.write_text(BASE.replace(hf_config, other_order))
    assert load_config(config_file).key == key
    config_file.write_text(BASE + "train: {learning_rate: 0.001, num_steps: 40}\n")
    assert load_config(config_file).key == key, "a default that is written out changes nothing"
    assert load_config(config_file, ["train.num_steps=41"]).key != key
    assert load_config(config_file, ["model.hf_config.text_config.hidden_size=65"]).key != key


def test_the_cluster_as_the_planner_sees_it(config_file):
    spec = load_config(config_file, ["cluster.num_nodes=3", "cluster.num_cores_per_node=2"]).cluster.spec()
    assert (spec.num_processes, spec.max_concurrency, spec.memory_per_process_bytes) == (12, 6, 2 * 2**30)
    assert load_config(config_file).cluster.spec().num_cores_per_node >= 1


MIXTURE = """\
datasets:
  - json_path: /data/{a,b}.json
    sampling_strategy: first:10%
  - {path: x.tar, image_folder: images, weight: 2}
"""


def mixture_of(folder: Path, text: str):
    (folder / "mixture.yaml").write_text(text)
    return load_mixture(folder / "mixture.yaml")


def test_mixtures_take_the_keys_of_llava(tmp_path):
    first, second = mixture_of(tmp_path, MIXTURE).datasets
    assert (first.path, first.sampling_strategy) == ("/data/{a,b}.json", "first:10%")
    assert first.weight is first.media_root is None
    assert (second.path, second.sampling_strategy, second.weight) == ("x.tar", "all", 2)
    assert second.media_root == Path("images")


@pytest.mark.parametrize(
    ("text", "where", "what", "hint"),
    [
        ("datasets: [{json_pth: x}]", "datasets.0.json_pth", "unknown key", "did you mean `json_path`? valid: annot"),
        ("datasets: [{path: x, json_path: y}]", "datasets.0", "`path` and `json_path` are aliases", ""),
        ("datasets: []", "datasets", "an empty mixture", "at least one entry"),
    ],
)
def test_errors_in_a_mixture_name_the_entry(tmp_path, text, where, what, hint):
    with pytest.raises(ConfigError) as caught:
        mixture_of(tmp_path, text)
    assert caught.value.where.endswith(where)
    assert what in caught.value.what
    assert hint in caught.value.hint


def test_an_override_is_parsed_as_safely(config_file):
    assert "refers to itself" in error_of(config_file, "train=&a [*a]").what
    assert "could not determine a constructor" in error_of(config_file, "name=!!python/name:os.system x").what


@pytest.mark.parametrize("name", ["a" * 151, "a/b", "../a", "a\nb", "a b", "%j", "$(x)", "", "-a", "a\n"])
def test_a_name_is_one_plain_word(config_file, name):
    assert "name" in error_of(config_file, f"name={json.dumps(name)}").where


@pytest.mark.parametrize("key", ["store", "runs"])
@pytest.mark.parametrize("folder", ["a\n#SBATCH --wrap=x", "a\x1b[2J", "a\u202eb"])
def test_folders_that_jobs_write_into_have_plain_names(config_file, key, folder):
    what = error_of(config_file, f"{key}={json.dumps(folder)}").what
    assert "no line break or control character" in what or "a path must be one line" in what


def test_a_cluster_takes_a_process_per_core_at_most_four(monkeypatch):
    for cores, processes in ((1, 1), (2, 2), (64, 4)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        found = ClusterConfig(name="here", num_processes_per_node="auto", memory_per_process_gib=1)
        assert found.num_processes_per_node == processes

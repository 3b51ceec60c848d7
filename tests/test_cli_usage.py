"""Help, usage errors and completion: what a person sees who does not know the commands yet."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from cyclopts import CycloptsError
from rich.console import Console

from dflop.cli import app, main
from dflop.cli.init import completion
from dflop.cli.usage import missing_package, usage_error
from dflop.store import console
from tests.jobs.configs import write_config
from tests.jobs.made import make_run
from tests.test_cli import command_of, dflop, subcommands

COMMANDS = [(), *subcommands(app)]
MAX_HELP_LINES = 40


def is_group(command: tuple[str, ...]) -> bool:
    return any(len(c) > len(command) and c[: len(command)] == command for c in COMMANDS)


def test_help_fits_a_screen_and_has_an_example():
    for command in COMMANDS:
        out = io.StringIO()
        app.help_print(command, console=Console(file=out, width=100))
        shown = out.getvalue()
        lines = shown.rstrip().splitlines()
        assert len(lines) <= MAX_HELP_LINES, shown
        assert max(map(len, lines)) <= 100
        assert is_group(command) or "Example: dflop" in " ".join(shown.split()), shown


def test_every_option_has_words_of_its_own():
    """A line of help that only repeats the option's name says nothing."""
    silent = []
    for command in COMMANDS[1:]:
        if (node := command_of(app, command)) is None:
            continue
        for argument in node.assemble_argument_collection(parse_docstring=True):
            if argument.parse and argument.show and not argument.parameter.help:
                silent.append((" ".join(command), argument.name))
    assert silent == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pln"], ("no command `dflop pln`", "did you mean `plan`?")),
        (["store", "ingst"], ("no command `dflop store ingst`", "did you mean `ingest`?", "valid: compact, gc")),
        (["plan", "a.yaml", "--explan"], ("`dflop plan` takes no option --explan", "did you mean `--explain`?")),
        (["plan"], ('"plan"', "requires an argument", "dflop plan --help")),
        (["sql", "a", "b"], ("`dflop sql` got unexpected arguments: b", "dflop sql --help")),
        (["sql", "runs", "--format", "cvs"], ('"cvs"', '"csv"', "dflop sql --help")),
    ],
)  # fmt: skip
def test_usage_errors_are_short_and_say_what_was_meant(arguments, said):
    with pytest.raises(CycloptsError) as caught:
        app(arguments, exit_on_error=False, print_error=False)
    error = usage_error(caught.value)
    assert error.exit_code == 2
    assert len(str(error).splitlines()) <= 3, error
    for words in said:
        assert words in str(error)


@pytest.mark.parametrize(("module", "extra"), [("ruamel.yaml", "plan"), ("prefect", "flows"), ("torch", "train")])
def test_a_package_that_is_not_installed_is_named_with_its_extra(module, extra):
    error = missing_package(ModuleNotFoundError(f"No module named {module!r}", name=module))
    assert error is not None
    assert error.what == f"this command needs the package {module.partition('.')[0]}"
    assert error.hint == f"pip install 'dflop[{extra}]', in {sys.prefix}"
    assert missing_package(ModuleNotFoundError("No module named 'dflop.oops'", name="dflop.oops")) is None


def test_completion_is_installed_where_the_shell_looks(tmp_path):
    done = dflop("completion", "fish", "--install", cwd=tmp_path, HOME=str(tmp_path), XDG_CONFIG_HOME="")
    assert done.returncode == 0, done.stderr
    (made,) = tmp_path.rglob("*.fish")
    assert str(made) in done.stdout


def test_bash_completes_a_command_and_an_option(tmp_path, capsys):
    completion("bash")
    script = capsys.readouterr().out
    driver = (
        script + '\nCOMP_WORDS=(dflop store sta); COMP_CWORD=2; COMP_LINE="dflop store sta"; COMP_POINT=${#COMP_LINE}\n'
        "f=$(complete -p dflop | sed 's/.*-F \\([^ ]*\\).*/\\1/'); $f dflop sta store; echo \"${COMPREPLY[@]}\"\n"
    )
    done = subprocess.run(["bash"], input=driver, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.split() == ["status"], done.stderr


WRONG = """
    2 run no.yaml | cannot read the configuration
    2 run folder
    2 run broken.yaml
    2 run binary.yaml
    2 run empty.yaml
    2 run list.yaml
    2 run unknown.yaml | did you mean `name`
    2 run run.yaml --set train.num_steps=-1
    2 run run.yaml --set nope
    2 run run.yaml --set a.b=1
    2 train no-run
    2 train latest --runs nowhere
    2 train latest --overfit 8
    2 train run.yaml --overfit 0
    2 serve --limit 0
    2 plan no.yaml
    2 plan run.yaml | a.jsonl
    2 plan run.yaml --device h1000
    2 plan run.yaml --device h100 --gpus 0
    2 plan run.yaml --device h100 --gpus 10 --gpus-per-node 8
    2 plan run.yaml --batch 0
    2 plan run.yaml --batch a,b
    2 plan run.yaml --emit nope
    2 plan run.yaml --format yaml
    2 plan run.yaml --explain --format csv
    2 plan run.yaml --picture a.bmp
    2 plan run.yaml --html no/a.html
    2 plan run.yaml --usd-per-gpu-hour -1 | 0 or more
    2 plan broken.json text.txt
    2 compare
    2 compare run.yaml --suite paper | no option --suite
    2 compare run.yaml --num-batches 0 | 1 or more
    2 compare run.yaml --num-steps 0 | 1 or more
    2 compare run.yaml --policy nope
    2 report no-run
    2 report damaged
    2 report idle
    2 trace idle
    2 trace idle --steps x
    2 trace idle --steps 5:1
    2 trace idle --out no/x.json
    2 demo-data text.txt
    2 demo-data made --num-samples 0 | 1 or more
    2 demo-data made --seed -1 | 0 or more
    2 demo-data made --family nope
    2 profile no.yaml
    2 profile run.yaml -n --device nope
    2 sql nope
    4 sql runs
    2 sql runs --timeout-s 0 | 0.001 or more
    2 sql runs --param x
    2 sql runs --format nope
    2 init --model no --data no
    2 init --model broken.json --data text.txt
    2 init --model run.yaml --data folder --gpus 0
    2 init --model run.yaml --data text.txt --out text.txt | already exists
    2 doctor --try
    2 completion tcsh
    2 cancel no-run
    2 cancel latest --runs nowhere
    0 cancel idle
    0 reap --runs nowhere
    4 history no-run
    2 history latest --runs nowhere
    2 replan idle
    2 export idle --out made
    2 export idle --out text.txt
    2 export idle
    2 chat idle hi
    2 chat folder hi
    2 chat idle hi --max-tokens 0 | 1 or more
    2 config show no.yaml
    2 config show binary.yaml
    2 config validate run.yaml
    2 config validate empty.yaml
    2 config schema nope
    4 cost show
    4 cost drift a b
    2 cost drift a
    2 cost drift a b --threshold -1 | 0 or more
    2 cost published no.yaml
    2 cost published empty.yaml
    2 data card no
    2 data card folder
    2 data profile run.yaml
    4 data show
    4 data drift a b
    2 data drift a b --threshold -1 | 0 or more
    0 runs list --runs nowhere
    2 runs show no-run
    2 runs show damaged
    0 runs show idle
    2 runs logs idle
    2 runs logs idle train
    5 runs script idle | no script to submit
    2 sampler estimate no.txt --ranks 2
    2 sampler estimate folder --ranks 2
    2 sampler estimate text.txt --ranks 2
    2 sampler estimate lengths.txt
    2 sampler estimate lengths.txt --ranks 0 | num_ranks is 0
    2 sampler estimate lengths.txt --ranks 2 --batch 0 | batch_size is 0
    2 sampler estimate lengths.txt --ranks 2 --microbatches 0 | num_microbatches is 0
    2 sampler estimate lengths.txt --ranks 2 --window 0 | window is 0
    2 sampler estimate lengths.txt --ranks 2 --max-steps 0 | 1 or more
    2 sampler estimate lengths.txt --ranks 2 --sync never
    2 store init --store made --keep-snapshots 0
    2 store init --store made --grace-s -1
    2 store init --store made --group nosuchgroup
    4 store init --store text.txt
    4 store migrate --store nowhere | no store
    4 store verify --store nowhere | no store
    4 store rebuild --store nowhere | no store
    4 store compact --store nowhere | no store
    4 store gc --store nowhere | no store
    4 store status --store nowhere
    2 store ingest --watch --interval-s 0 | 0.001 or more
    2 store compact --min-files 0 | 1 or more
    2 store compact --min-age-h -1 | 0 or more
"""
"""Exit code, command, and what it says: 0 ok, 1 failed, 2 usage or configuration, 4 store, 5 launch."""


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `WRONG` names: files, a run that has not begun and one that is damaged."""
    folder = tmp_path_factory.mktemp("wrong")
    write_config(folder)
    make_run(folder, "idle")
    for name in ("folder", "runs/damaged"):
        (folder / name).mkdir()
    files = {
        "broken.yaml": "name: [", "unknown.yaml": "nam: x", "empty.yaml": "", "list.yaml": "- 1", "broken.json": "{",
        "text.txt": "hello", "lengths.txt": "1\n2\n3\n4\n" * 8,
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    return folder


@pytest.mark.parametrize("line", [line.strip() for line in WRONG.strip().splitlines()])
def test_wrong_input_ends_with_its_exit_code_and_no_traceback(line, wrong, monkeypatch, capsys):
    """In this process, where anything but an error of ours is an exception."""
    (code, *words), _, said = line.partition(" | ")[0].split(), *line.partition(" | ")[1:]
    monkeypatch.chdir(wrong)
    monkeypatch.setattr(sys, "argv", ["dflop", *words])
    monkeypatch.setattr(console, "bound_process", lambda timeout_s: None)  # it would end this process
    try:
        found = main()
    except SystemExit as end:
        found = end.code
    told = capsys.readouterr().err
    assert (found or 0) == int(code), told
    assert said in told
    assert told.count("dflop: ") == (code != "0")
    assert not (wrong / "made").exists()

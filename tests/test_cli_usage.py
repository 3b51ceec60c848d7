"""Help, usage errors and completion: what a person sees who does not know the commands yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflop.cli import app
from dflop.cli.usage import subcommands
from tests.test_cli import assert_refused, dflop

COMMANDS = [(), *subcommands(app)]
MAX_HELP_LINES = 40


def help_of(command: tuple[str, ...], folder: Path) -> str:
    done = dflop(*command, "--help", cwd=folder, COLUMNS="100")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_a_screen_and_has_an_example(command, tmp_path):
    shown = help_of(command, tmp_path)
    lines = shown.rstrip().splitlines()
    assert len(lines) <= MAX_HELP_LINES, shown
    assert max(map(len, lines)) <= 100
    is_group = command and any(len(c) > len(command) and c[: len(command)] == command for c in COMMANDS)
    if not is_group:
        assert "Example: dflop" in " ".join(shown.split()), shown


def test_every_option_has_words_of_its_own():
    """A line of help that only repeats the option's name says nothing."""
    silent = []
    for command in COMMANDS[1:]:
        node = app
        for word in command:
            node = node[word]
        if node.default_command is None:
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
        (["config", "shw", "a.yaml"], ("no command `dflop config shw`", "did you mean `show`?")),
        (["plan", "a.yaml", "--explan"], ("`dflop plan` takes no option --explan", "did you mean `--explain`?")),
        (["plan"], ('"plan"', "requires an argument", "dflop plan --help")),
        (["sql", "a", "b"], ("`dflop sql` does not know what to do with: b", "dflop sql --help")),
        (["sql", "runs", "--format", "cvs"], ('"cvs"', '"csv"', "dflop sql --help")),
        (["store", "gc", "--frobnicate"], ("`dflop store gc` takes no option --frobnicate", "valid: ")),
        (["completion", "tcsh"], ('"tcsh"', '"bash"')),
        (["--nope"], ("takes no option --nope",)),
        (["config", "schema", "stage"], ('"stage"', '"cluster"')),
    ],
)  # fmt: skip
def test_usage_errors_are_short_and_say_what_was_meant(arguments, said, tmp_path):
    done = dflop(*arguments, cwd=tmp_path)
    assert_refused(done, 2, *said)
    assert 1 <= len(done.stderr.splitlines()) <= 3, done.stderr


def test_without_a_command_the_commands_are_shown(tmp_path):
    done = dflop(cwd=tmp_path)
    assert done.returncode == 0
    assert " doctor " in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_know_every_command(shell, tmp_path):
    done = dflop("completion", shell, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for command in COMMANDS[1:]:
        assert command[-1] in done.stdout
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0


def test_completion_is_installed_where_the_shell_looks(tmp_path):
    done = dflop("completion", "fish", "--install", cwd=tmp_path, HOME=str(tmp_path), XDG_CONFIG_HOME="")
    assert done.returncode == 0, done.stderr
    (made,) = tmp_path.rglob("*.fish")
    assert str(made) in done.stdout


def test_bash_completes_a_command_and_an_option(tmp_path):
    script = dflop("completion", "bash", cwd=tmp_path).stdout
    driver = (
        script + '\nCOMP_WORDS=(dflop store sta); COMP_CWORD=2; COMP_LINE="dflop store sta"; COMP_POINT=${#COMP_LINE}\n'
        "f=$(complete -p dflop | sed 's/.*-F \\([^ ]*\\).*/\\1/'); $f dflop sta store; echo \"${COMPREPLY[@]}\"\n"
    )
    done = subprocess.run(["bash"], input=driver, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.split() == ["status"], done.stderr


def test_python_m_dflop_cli_is_the_same_program(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "dflop.cli", "--version"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stdout.strip()

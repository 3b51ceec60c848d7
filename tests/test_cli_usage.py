"""Help, usage errors and completion: what a person sees who does not know the commands yet."""

import io
import subprocess
import sys

import pytest
from cyclopts import CycloptsError
from rich.console import Console

from dflop.cli import app
from dflop.cli.init import completion
from dflop.cli.usage import missing_package, usage_error
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

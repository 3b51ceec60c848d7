"""Examples in the documents work: commands parse, YAML has keys that exist, SQL runs on a store, Python compiles."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
from cyclopts import CycloptsError, MissingArgumentError
from ruamel.yaml import YAML

from dflop.cli import app
from dflop.cli.usage import subcommands
from dflop.config import json_schema
from dflop.store import console
from dflop.store.ingest import ingest
from dflop.store.spool import SpoolWriter
from tests.store.conftest import Make
from tests.story import story
from tests.test_documents import DOCUMENTS, FENCED, ROOT

LANGUAGES = {"", "sh", "python", "yaml", "sql", "schema"}
OTHERS = ("make", "prefect", "python", "python3.11", "source", "export", "sbatch", "kill", "duckdb", "torchrun", "pip",
          ".venv/bin/python", ".venv/bin/pip", "apt-get", "su", "curl")  # fmt: skip
"""Programs that examples may name besides ours."""


class Block(NamedTuple):
    path: Path
    language: str
    text: str


def blocks() -> Iterator[Block]:
    for path in DOCUMENTS:
        for fenced in FENCED.findall(path.read_text()):
            head, _, rest = fenced.partition("\n")
            yield Block(path, head.removeprefix("```").strip(), rest.removesuffix("```"))


BLOCKS = list(blocks())


def of(*languages: str) -> list[Any]:
    found = [block for block in BLOCKS if block.language in languages]
    return [pytest.param(b, id=f"{b.path.stem}-{n}") for n, b in enumerate(found)]


def test_every_block_has_a_language_that_is_tried():
    assert {block.language for block in BLOCKS} <= LANGUAGES


def commands_in(line: str) -> Iterator[list[str]]:
    """The commands of a shell line, as words; what is behind a redirection is left out."""
    words: list[str] = []
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&<>")
    lexer.whitespace_split = True
    skip = False
    for word in lexer:
        if set(word) <= set(";|&"):
            if words:
                yield words
            words, skip = [], False
        elif set(word) <= set("<>"):
            skip = True
        elif not skip:
            words.append(word)
    if words:
        yield words


def check_ours(words: list[str], *, is_partial: bool = False) -> None:
    """A command of ours parses; one that is named in passing may lack arguments."""
    try:
        app.parse_args(words, exit_on_error=False, print_error=False)
    except MissingArgumentError:
        assert is_partial, words
    except CycloptsError as error:
        raise AssertionError(f"dflop {' '.join(words)}: {error}") from None


def ours(words: list[str]) -> list[str] | None:
    """Arguments of our program, if that is what a command is; variables before it are left out."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words[1:] if words and words[0] in ("dflop", ".venv/bin/dflop") else None


@pytest.mark.parametrize("block", of("sh"))
def test_commands_of_a_block_parse(block):
    for line in block.text.replace("\\\n", " ").splitlines():
        for words in commands_in(line):
            if (arguments := ours(words)) is not None:
                check_ours(arguments)
            else:
                assert words[0] in OTHERS, line


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.stem)
def test_commands_named_in_passing_exist(path):
    for quoted in re.findall(r"`(dflop [^`]+)`", FENCED.sub("", path.read_text()).replace("\n", " ")):
        if not re.search(r"[{}]|\.\.\.|dflop/", quoted):
            words = next(commands_in(quoted))
            check_ours(words[1:], is_partial=True)


@pytest.mark.parametrize("command", subcommands(app), ids=" ".join)
def test_the_example_in_a_commands_help_parses(command):
    node = app
    for word in command:
        node = node[word]
    text = " ".join((node.help or "").split())
    if node.default_command is None:
        return
    example = text.partition("Example: ")[2].partition(" Args: ")[0]
    found = [words for words in commands_in(re.sub(r'eval "\$\((.*?)\)"', r"\1", example)) if ours(words) is not None]
    assert found, text
    for words in found:
        arguments = ours(words)
        assert arguments is not None
        check_ours([a.rstrip(".,") for a in arguments])


def without_required(schema: Any) -> Any:
    """The same schema for a part of a file."""
    if isinstance(schema, dict):
        return {key: without_required(value) for key, value in schema.items() if key != "required"}
    return [without_required(value) for value in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("block", of("yaml"))
def test_keys_of_a_yaml_block_exist(block):
    jsonschema.validate(YAML(typ="safe").load(block.text), without_required(json_schema()))


@pytest.mark.parametrize("block", of("python"))
def test_a_python_block_compiles(block):
    compile(block.text, str(block.path), "exec")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recipes") / "store"
    with SpoolWriter(root, "RUN", "p") as spool:
        for record in story("RUN"):
            spool.append(record)
        for step in range(3):
            spool.append(Make.observation(step, run_id="RUN"))
            spool.append(Make.step_plan(step, run_id="RUN"))
        for index in range(4):
            spool.append(Make.shape(index))
    with SpoolWriter(root, "RUN/compare", "p") as spool:
        for step, policy, step_s in ((0, "arrival", 1.2), (1, "balanced", 1.0)):
            spool.append(Make.observation(step, run_id="RUN/compare", policy=policy, step_s=step_s))
            spool.append(Make.step_plan(step, run_id="RUN/compare", policy=policy))
    ingest(root)
    return root


@pytest.mark.parametrize("block", of("sql"))
def test_a_sql_block_runs(store, block):
    columns, _ = console.query(store, block.text)
    assert columns


def test_most_recipes_answer_something(store):
    recipes = [block.text for block in BLOCKS if block.language == "sql"]
    assert len(recipes) >= 12
    assert sum(bool(console.query(store, text)[1]) for text in recipes) >= len(recipes) / 2


def test_sql_in_quotes_runs(store):
    """`dflop sql "select ..."` in any document."""
    for path in DOCUMENTS:
        for text in re.findall(r'dflop sql "([^"]+)"', path.read_text()):
            if "..." not in text:
                assert console.query(store, text)[0]


def test_json_that_is_shown_is_json():
    for block in BLOCKS:
        if block.text.lstrip().startswith("{"):
            json.loads(block.text)


def test_the_test_sees_what_is_wrong():
    for words in (["runs", "lst"], ["plan", "a.yaml", "--explan"], ["plan"]):
        with pytest.raises(AssertionError):
            check_ours(words)
    assert list(commands_in('dflop a "b c" > x.json; dflop d | head  # e')) == [
        ["dflop", "a", "b c"],
        ["dflop", "d"],
        ["head"],
    ]
    assert (ROOT / "docs" / "guide.md") in DOCUMENTS
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"trian": {}}, without_required(json_schema()))

"""Examples in the documents work: commands parse, YAML has keys that exist, SQL runs on a store, Python compiles."""

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
from dflop.config import json_schema
from dflop.store import console
from tests.store.asking import fill, write
from tests.store.conftest import Make
from tests.story import story
from tests.test_cli import command_of, subcommands
from tests.test_documents import DOCUMENTS, FENCED, ROOT

LANGUAGES = {"", "sh", "python", "yaml", "sql", "schema"}
OTHERS = (
    "make", "chmod", "prefect", "python", "python3.11", "source", "export", "sbatch", "kill", "duckdb", "torchrun",
    "pip", ".venv/bin/python", ".venv/bin/pip", "apt-get", "su", "curl", "ssh",
)  # fmt: skip
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


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


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


def refusal(words: list[str], *, is_partial: bool = False) -> str:
    """Why a command of ours does not parse; empty where it does. One that is named in passing may lack arguments."""
    try:
        app.parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        if not (is_partial and isinstance(error, MissingArgumentError)):
            return f"dflop {' '.join(words)}: {error}"
    return ""


def ours(words: list[str]) -> list[str] | None:
    """Arguments of our program, if that is what a command is; variables before it are left out."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words[1:] if words and words[0] in ("dflop", ".venv/bin/dflop") else None


def test_commands_of_blocks_parse():
    refused = []
    for block in of("sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            for words in commands_in(line):
                if (arguments := ours(words)) is not None:
                    refused.append(refusal(arguments))
                elif words[0] not in OTHERS:
                    refused.append(f"{block.path.name}: {line}")
    assert [*filter(None, refused)] == []


def test_commands_named_in_passing_exist():
    quoted = [
        text
        for path in DOCUMENTS
        for text in re.findall(r"`(dflop [^`]+)`", FENCED.sub("", path.read_text()).replace("\n", " "))
        if not re.search(r"[{}]|\.\.\.|dflop/", text)
    ]
    assert len(quoted) > 20
    refused = [refusal(next(commands_in(text))[1:], is_partial=True) for text in quoted]
    assert [*filter(None, refused)] == []


def test_the_example_in_a_commands_help_parses():
    for command in subcommands(app):
        if (node := command_of(app, command)) is None:
            continue
        text = " ".join((node.help or "").split())
        example = text.partition("Example: ")[2].partition(" Args: ")[0]
        example = re.sub(r'eval "\$\((.*?)\)"', r"\1", example)
        found = [arguments for words in commands_in(example) if (arguments := ours(words)) is not None]
        assert found, text
        assert [*filter(None, (refusal([a.rstrip(".,") for a in arguments]) for arguments in found))] == []


def without_required(schema: Any) -> Any:
    """The same schema for a part of a file."""
    if isinstance(schema, dict):
        return {key: without_required(value) for key, value in schema.items() if key != "required"}
    return [without_required(value) for value in schema] if isinstance(schema, list) else schema


def test_keys_of_yaml_blocks_exist():
    schema = without_required(json_schema())
    for block in of("yaml"):
        jsonschema.validate(YAML(typ="safe").load(block.text), schema)


def test_python_blocks_compile():
    for block in of("python"):
        compile(block.text, str(block.path), "exec")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recipes") / "store"
    steps = [record(step, run_id="RUN") for step in range(3) for record in (Make.observation, Make.step_plan)]
    write(root, *story("RUN"), *steps, *map(Make.shape, range(4)), run_id="RUN")
    compared = []
    for step, policy, step_s in ((0, "arrival", 1.2), (1, "balanced", 1.0)):
        changes = {"run_id": "RUN/compare", "policy": policy}
        compared += [Make.observation(step, step_s=step_s, **changes), Make.step_plan(step, **changes)]
    return fill(root, *compared, run_id="RUN/compare")


def test_sql_blocks_run_and_most_answer_something(store):
    recipes = [block.text for block in of("sql")]
    rows = re.findall(r"^\| .*\? \| (.+) \|$", (ROOT / "docs" / "sql-recipes.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(recipes) + len(named) >= 20
    assert named <= {query.name for query in console.list_queries()}
    answers = [console.query(store, text) for text in recipes]
    assert all(columns for columns, _ in answers)
    assert sum(bool(rows) for _, rows in answers) >= len(recipes) / 2


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

"""`dflop model`: what a model of transformers is made of, and whether generic stages compute it exactly."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from dflop.cli.common import DEFAULT_STORE, Form, Json, Quiet, Store, form_of, talk

if TYPE_CHECKING:
    from dflop.models.generic.check import ModelCheck
    from dflop.models.generic.values import LayerKind, Structure
    from dflop.report.tables import Table

app = App(name="model", help="Models of transformers: what they are made of, and if stages are exact.")

_COLUMNS = ("part", "name", "num", "num_params", "num_active_params", "flops_per_token", "flops_per_pair",
            "kept_bytes_per_token", "tp", "error", "float64_error", "detail", "factor")  # fmt: skip


@app.command
def check(
    folder: Annotated[Path, Parameter(help="Folder with config.json, processor and tokenizer; no weights needed.")],
    /,
    *,
    form: Form = "table",
    as_json: Json = False,
    store: Store = DEFAULT_STORE,
    quiet: Quiet = False,
) -> None:
    """Check a multimodal model without its weights: kinds of layers, sizes, token counts, gradients of a shrunk copy.

    The copy (two layers of each kind) takes two steps on packed, uneven samples in two pipeline stages; gradients are
    compared with plain transformers, sample by sample, on the CPU. Exit code 1 where they differ or stages do not run.
    `dflop plan` takes every type that is read here. The store keeps the result for the reports of this model's runs.

    Example: dflop model check Qwen3.5-9B
    """
    from rich.console import Console

    from dflop.models import cache_of_models
    from dflop.models.generic.check import check_model, keep_check
    from dflop.profile.hardware import software_name
    from dflop.report.rows import print_rows
    from dflop.report.table_text import print_table
    from dflop.run.lifecycle import code_revision

    say = talk(quiet)
    found = check_model(folder)
    if (shown := form_of(form, as_json)) != "table":
        print_rows(_COLUMNS, (row + (None,) * (len(_COLUMNS) - len(row)) for row in rows_of(found)), shown)
    else:
        for table in tables_of(found):
            print_table(table, Console())
    try:
        file = keep_check(found, folder, cache_of_models(store), software_name(), code_revision())
        say(f"kept for reports: {file}")
    except OSError as error:
        say(f"reports will not have this result: cannot write into `{store}`: {error.strerror or error}")
    if not found.exactness.is_exact:
        sys.exit(1)


def rows_of(found: ModelCheck) -> Iterator[tuple[Any, ...]]:
    """A row per kind of layer, end, encoder and check, for programs; columns that are left out at the end are empty."""
    structure = found.structure
    for kind in structure.kinds:
        yield (
            "layers", kind.name, len(kind.layers), kind.num_params, kind.num_active_params, kind.flops_per_token,
            sum(call.flops_per_pair for call in kind.attention), kind.kept_bytes_per_token, list(kind.degrees),
        )  # fmt: skip
    for name, num_params in (("entry", structure.num_entry_params), ("exit", structure.num_exit_params)):
        yield (name, "tied" if structure.is_tied else "", 1, num_params, num_params)
    for encoder in structure.encoders:
        yield ("encoder", encoder.path, encoder.num_layers, encoder.num_params)
        if encoder.projector:
            yield ("projector", ", ".join(encoder.projector), 1, encoder.num_projector_params)
    yield ("model", structure.model_type, 1, structure.num_params, structure.num_active_params, None, None, None,
           list(structure.degrees))  # fmt: skip
    empty = (None,) * 7
    for tokens in found.media:
        yield ("tokens", tokens.kind, tokens.num_items, *empty[1:], None, None, str(tokens))
    if found.media_problem:
        yield ("tokens", "", *empty, None, None, found.media_problem)
    for of in found.exactness.checks:
        yield ("exactness", of.medium, *empty, of.error, of.float64_error, of.problem or f"worst: {of.errors[0][0]}")
    for trap in found.traps:
        detail = f"{trap}; {trap.remedy}" if trap.remedy else str(trap)
        yield ("kernel", trap.name, *empty, None, None, detail, trap.factor)


def tables_of(found: ModelCheck) -> Iterator[Table]:
    """The same for people."""
    from dflop.report.model_check import exactness_table
    from dflop.report.tables import make_table
    from dflop.units import count, num_bytes

    structure = found.structure
    yield make_table(
        f"{structure.model_type}: {count(structure.num_params)} parameters, {structure.num_layers} decoder layers",
        structure.kinds,
        {
            "layers": lambda kind: f"{len(kind.layers)}x {kind.name}",
            "parameters": lambda kind: count(kind.num_params),
            "active": lambda kind: count(kind.num_active_params),
            "FLOPs/token": lambda kind: count(kind.flops_per_token),
            "kept/token": lambda kind: num_bytes(kind.kept_bytes_per_token),
            "attention": _attention_text,
            "tp": lambda kind: ", ".join(map(str, kind.degrees)),
        },
        {"layers", "attention", "tp"},
        "Of one layer, forward; kept: bytes for the backward pass in bfloat16.",
    )
    yield make_table(
        "Outside the layers", _outside(structure),
        {"part": lambda part: part[0], "module": lambda part: part[1], "parameters": lambda part: count(part[2])},
        {"part", "module"},
    )  # fmt: skip
    yield make_table(
        "Tokens of media, counted from sizes against calls of the processor",
        [(of.kind, str(of)) for of in found.media] or [("all", f"not checked: {found.media_problem}")],
        {"medium": lambda row: row[0], "verdict": lambda row: row[1]},
        {"medium", "verdict"},
    )
    yield exactness_table(found.exactness.checks)
    yield make_table(
        "What may be several times slower than it need be, measured on this device",
        found.traps,
        {
            "part": lambda trap: trap.name,
            "verdict": lambda trap: "slow" if trap.is_hit else "ok",
            "measured": str,
            "remedy": lambda trap: trap.remedy,
        },
        {"part", "verdict", "measured", "remedy"},
    )


def _outside(structure: Structure) -> Iterator[tuple[str, str, int]]:
    yield "entry", f"{structure.decoder} embeddings", structure.num_entry_params
    yield "exit", "head tied to the embeddings" if structure.is_tied else "norm and head", structure.num_exit_params
    for encoder in structure.encoders:
        yield "encoder", f"{encoder.path}, {encoder.num_layers} layers", encoder.num_params
        if encoder.projector:
            yield "projector", ", ".join(encoder.projector), encoder.num_projector_params
    if structure.num_other_params:
        yield "other", "single parameters", structure.num_other_params


def _attention_text(kind: LayerKind) -> str:
    """`32/8 x 128, window 4096`: heads of queries and keys, their width, and of values where it differs."""
    texts = []
    for call in kind.attention:
        width = f"{call.head_dim}" if call.head_dim == call.value_dim else f"{call.head_dim}/{call.value_dim}"
        reach = f", window {call.window}" * bool(call.window) + f", chunk {call.chunk}" * bool(call.chunk)
        texts.append(f"{call.num_heads}/{call.num_kv_heads} x {width}{reach}")
    return "; ".join(dict.fromkeys(texts))

"""Tables of the claims for documents: pure, from what `python -m tests.bench.claims --json FILE` wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.bench.claims.record import shown
from tests.bench.markdown import table

MOST_READINGS = 4
"""In a cell of the table; details have tables of their own."""
RATIO_COLUMNS = {
    "uniform_tuned": "tuned", "uniform_tuned_charged": "tuned, charged", "uniform_default": "default",
    "uniform_default_charged": "default, charged", "padded": "padded", "padded_charged": "padded, charged",
    "fixed_length": "fixed length", "fixed_length_charged": "fixed, charged",
}  # fmt: skip


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """Markdown by name: `claims`, `claims-notes`, and what is known in detail of those that were tested."""
    claims = {claim["name"]: claim for claim in content["claims"]}
    found = {"claims": claims_table(list(claims.values())), "claims-notes": notes(list(claims.values()))}
    makers = {
        "throughput": baselines_table, "scaling": scaling_table, "balance": balance_table, "ablation": ablation_table,
        "correction": correction_table, "initialisation": initialisation_table,
    }  # fmt: skip
    for name, make in makers.items():
        if name in claims and claims[name]["details"]:
            found[f"claims-{name}"] = make(claims[name]["details"])
    return found


def claims_table(claims: Sequence[Mapping[str, Any]]) -> str:
    """A row per claim."""
    header = ("claim", "how it was tested", "paper", "here", "", "verdict", "where it is worse, and why")
    rows = [
        (
            c["claim"], c["how"], c["paper"], "<br>".join(_judged(c)), c["basis"], c["verdict"],
            "<br>".join(c["worse"].split("; ")) or "-",
        )
        for c in claims
    ]  # fmt: skip
    return table(header, rows)


def _judged(claim: Mapping[str, Any]) -> list[str]:
    """Texts of the readings that the verdict rests on; of many the first and the last ones."""
    names = {e["reading"] for e in claim["expectations"]}
    told = [text for r, text in zip(claim["readings"], claim["ours"], strict=True) if r["what"] in names]
    if len(told) <= MOST_READINGS:
        return told
    half = MOST_READINGS // 2
    return [*told[:half], f"({len(told) - 2 * half} more below)", *told[-half:]]


def notes(claims: Sequence[Mapping[str, Any]]) -> str:
    """What else the figures say, a list."""
    return "\n".join(f"- *{c['name']}*: {note}" for c in claims for note in c["notes"])


def baselines_table(details: Sequence[Mapping[str, Any]]) -> str:
    """Gains by model, data and baseline."""
    keys = [key for key in RATIO_COLUMNS if any(_is_number(row[f"gain_over_{key}"]) for row in details)]
    rows = []
    for (model, data), mine in _grouped(details, "model", "data"):
        over = sum(row["batches_over_memory"].get("uniform tuned") or 0 for row in mine)
        rows.append((
            model, data, *(_spread([row[f"gain_over_{key}"] for row in mine], "x") for key in keys),
            f"{over} of {sum(row['num_batches'] for row in mine)}", _spread([row["bound"] for row in mine], "x"),
        ))  # fmt: skip
    header = ("model", "data", *(RATIO_COLUMNS[key] for key in keys), "tuned beyond its memory", "bound")
    return table(header, rows)


def scaling_table(details: Sequence[Mapping[str, Any]]) -> str:
    """Gains by number of nodes."""
    return _by(details, ("sweep", "num_nodes"), {"gain": "x", "bound": "x", "idle_tuned": "%", "idle_ours": "%"})


def balance_table(details: Sequence[Mapping[str, Any]]) -> str:
    """Gains by the encoder's share."""
    columns = {"encoder_share": "%", "gain": "x", "gain_by_order_alone": "x", "bound": "x", "idle_tuned": "%"}
    return _by(details, ("encoder_factor",), columns)


def ablation_table(details: Sequence[Mapping[str, Any]]) -> str:
    """Gains by part."""
    columns = {"planner_for_arrival": "x", "planner": "x", "scheduler": "x", "both": "x"}
    return _by(details, ("model", "data"), columns)


def correction_table(details: Sequence[Mapping[str, Any]]) -> str:
    """Gains by kind, rate and delay of anomalies."""
    columns = {"gain": "%", "net_gain": "%", "best_gain": "%", "on_frac": "%"}
    return _by(details, ("kind", "rate", "delay"), columns)


def initialisation_table(details: Sequence[Mapping[str, Any]]) -> str:
    """Seconds and shares by model and profile."""
    columns = {
        "probing_s": "s", "budget_s": "s", "planning_cpu_s": "s", "step_s": "s", "of_epoch": "%",
        "of_paper_training": "%",
    }  # fmt: skip
    return _by(details, ("model", "profile"), columns)


def _by(details: Sequence[Mapping[str, Any]], keys: Sequence[str], columns: Mapping[str, Any]) -> str:
    rows = [
        (*map(_key, of), *(_spread([row[name] for row in mine], unit) for name, unit in columns.items()))
        for of, mine in _grouped(details, *keys)
    ]
    return table([name.removesuffix("_s").replace("_", " ") for name in (*keys, *columns)], rows)


def _grouped(details: Sequence[Mapping[str, Any]], *keys: str) -> list[tuple[tuple[Any, ...], list[Mapping[str, Any]]]]:
    """Rows that differ in their seed alone, in the order in which they first come."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in details:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(found.items())


def _spread(values: Sequence[float], unit: Any) -> str:
    """Mean, and half the range over seeds."""
    known = [v for v in values if _is_number(v)]
    if not known:
        return "none"
    mean = shown(sum(known) / len(known), unit)
    return mean if len(known) < 2 else f"{mean} ±{shown((max(known) - min(known)) / 2, unit)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value == value


def _key(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

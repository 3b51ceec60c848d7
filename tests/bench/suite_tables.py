"""What the suites found, as tables for documents and for the terminal."""

from collections.abc import Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import Any

from dflop.compare.contest import EXPERTS, IF_COMPILED, OURS, TUNED
from dflop.records.speedup import speedup
from tests.bench.markdown import percent, ratio, span, table

REFERENCE = "reference"
SHOWN = {
    TUNED: "uniform, arrival order",
    REFERENCE: "the reference's rule",
    "token LPT": "uniform, token LPT",
    "Megatron expert": "Megatron expert",
    "FSDP2": "FSDP2, balanced tokens",
    "FSDP2 + SP": "FSDP2 + SP",
    "Megatron + CP": "Megatron + CP",
    "FSDP2 + EP": "FSDP2 + EP",
    "Megatron + EP": "Megatron + EP",
    OURS: "**dflop**",
    IF_COMPILED: "dflop, if compiled",
}
Case = Mapping[str, Any]
PLAN_HEADER = ("model", "data", "dflop", "tokens/s/GPU", "MFU", "best expert", "its plan", "tokens/s/GPU", "MFU")


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`suite`: seconds of a step, and the plans of ours and the best expert's; `suite-short`: what we gain.

    Of a suite other than the paper's: a table of its name.
    """
    cases: Sequence[Case] = content["cases"]
    if content["suite"] != "paper":
        gains = [_over_experts(case) for case in cases if best_expert(case)]
        mean = ("geometric mean", *[""] * 6, f"{geometric_mean(gains):.3f}x" if gains else "", "")
        return {content["suite"]: table(SETTING_HEADER, [*map(_setting_row, cases), mean])}
    shown = [name for name in SHOWN if any(name in case["step_s"] for case in cases)]
    header = ("model", "data", *(SHOWN[name] for name in shown), "over the best expert", "over arrival order")
    rows = [_row(case, shown) for case in cases]
    for data in dict.fromkeys(case["data"] for case in cases):
        of = [case for case in cases if case["data"] == data]
        uniform = [_over(case, TUNED) for case in of if TUNED in case["step_s"]]
        means = [ratio(geometric_mean(gains)) for gains in ([_over_experts(case) for case in of], uniform)]
        rows.append(("geometric mean", data, *[""] * len(shown), *means))
    return {
        "suite": f"{table(header, rows)}\n\n{_notes(cases)}\n\nThe plans, inline unless they say split, with their "
        f"numbers of microbatches:\n\n{table(PLAN_HEADER, map(_plan_row, cases))}",
        "suite-short": _short(cases),
    }


SETTING_HEADER = (
    "setting",
    "samples",
    "batches",
    "dflop",
    "s a step",
    "best expert",
    "s a step",
    "over it",
    "planned in",
)


def _setting_row(case: Case) -> tuple[str, ...]:
    best, planned = best_expert(case), f"{case['plan_cpu_s']:.0f} s"
    size, num_unseen = str(case["global_batch_size"]), str(len(case["bound_s"]))
    rival = (
        (f"{best}: {_plan_text(case, best)}", _step(case, best), f"{_over(case, best):.3f}x")
        if best
        else ("none fits", "", "")
    )
    return (case["label"], size, num_unseen, _plan_text(case, OURS), f"**{_step(case, OURS)}**", *rival, planned)


def _step(case: Case, name: str) -> str:
    return f"{fmean(case['step_s'][name]):.1f}"


def _row(case: Case, shown: Sequence[str]) -> tuple[str, ...]:
    uniform = ratio(_over(case, TUNED)) if TUNED in case["step_s"] else ""
    return (case["model"], case["data"], *_cells(case, shown), ratio(_over_experts(case)), uniform)


def _cells(case: Case, shown: Sequence[str]) -> list[str]:
    cells = []
    for name in shown:
        if name not in case["step_s"]:
            cells.append("none fits")
            continue
        text = f"{fmean(case['step_s'][name]):.1f} s{' !' if _exceeds(case, name) else ''}"
        cells.append(f"**{text}**" if name == OURS else text)
    return cells


def _plan_row(case: Case) -> tuple[str, ...]:
    best = best_expert(case)
    return (case["model"], case["data"], *_plan_cells(case, OURS), best, *_plan_cells(case, best))


def _plan_cells(case: Case, name: str) -> tuple[str, ...]:
    return (
        _plan_text(case, name),
        f"{case['tokens_per_s_per_gpu'][name]:,.0f}",
        percent(case["mfu_frac"][name]),
    )


def _plan_text(case: Case, name: str) -> str:
    plan = case["plans"][name]
    return f"{plan['layout'].removeprefix('inline ')}, {plan['num_microbatches']}"


def _over(case: Case, name: str) -> float:
    """Ours over another's."""
    return speedup(case["step_s"][name], case["step_s"][OURS]).mean


def best_expert(case: Case) -> str:
    """The fastest of what experts run and holds all batches; empty where none does."""
    held = [name for name in EXPERTS if name in case["step_s"] and not _exceeds(case, name)]
    return min(held, key=lambda name: fmean(case["step_s"][name]), default="")


def _over_experts(case: Case) -> float:
    return _over(case, best_expert(case))


def _exceeds(case: Case, name: str) -> bool:
    return case["num_over_cap"].get(name, 0) > 0 or (name == REFERENCE and not case["reference_fits"])


def _notes(cases: Sequence[Case]) -> str:
    bound, of_our_tp = (
        [speedup(case["step_s"][OURS], case[name]).mean for case in cases] for name in ("bound_s", "bound_of_our_tp_s")
    )
    none = ", ".join(f"{case['model']} on {case['data']}" for case in cases if TUNED not in case["step_s"])
    return (
        f"`!`: some of {len(cases[0]['bound_s'])} batches, or the plan itself, exceed memory, so it would not run: the "
        f"tuned uniform plan in arrival order in {_num_over(cases, TUNED)} of {len(cases)} cases, ours in "
        f"{_num_over(cases, OURS)}. {f'No uniform plan fits for {none}. ' if none else ''}Perfect balance without a "
        f"bubble at every module's best tp would be {span(bound, '.1f')} times as fast as ours, at the tp and "
        f"recomputation that memory makes our plans choose {span(of_our_tp)} times."
    )


def _num_over(cases: Sequence[Case], name: str) -> int:
    return sum(_exceeds(case, name) for case in cases)


def _short(cases: Sequence[Case]) -> str:
    uniform = [_over(case, TUNED) for case in cases if TUNED in case["step_s"]]
    experts = [_over_experts(case) for case in cases]
    priced = ""
    if all(IF_COMPILED in case["step_s"] for case in cases):
        gains = [speedup(case["step_s"][best_expert(case)], case["step_s"][IF_COMPILED]).mean for case in cases]
        priced = (
            " Megatron's and FSDP2's programs are priced as fused or compiled, as they are run, dflop's as eager, "
            f"as it runs; were its layers compiled, its plans would be {ratio(geometric_mean(gains))} as fast."
        )
    kinds = dict.fromkeys(f"{case['data']} data" for case in cases)
    of_model: dict[str, list[str]] = {}
    for case, gain in zip(cases, experts, strict=True):
        of_model.setdefault(case["model"], []).append(ratio(gain))
    return (
        f"Whole plans of the paper's models on {cases[0]['num_gpus']} A100, **simulated**, nothing of it measured: "
        f"{ratio(geometric_mean(experts))} as fast as the best of what experts run: uniform and packed by tokens; "
        "Megatron-LM with layers cut by cost, sequence parallelism and recomputed MLPs, or with context parallelism; "
        f"FSDP2 with balanced tokens, alone or with Ulysses sequence parallelism.{priced}\n\n"
        f"{table(('over the best expert', *kinds), [(model, *gains) for model, gains in of_model.items()])}\n\n"
        f"Over the best uniform plan in arrival order, which exceeds memory in {_num_over(cases, TUNED)} of the "
        f"{len(uniform)} cases where there is one, it is {span(uniform)}x."
    )

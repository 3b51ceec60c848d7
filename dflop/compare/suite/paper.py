"""`--suite paper`: the paper's models on 8 nodes of 8 A100, as speed-ups over the tuned uniform plan."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from dflop.compare.suite.cases import CASES, Case, make_setting
from dflop.compare.suite.contest import (
    BATCHES,
    DEFAULT,
    GROUPED,
    OURS,
    REFERENCE,
    RIVALS,
    TOKEN_LPT,
    TUNED,
    Contest,
    by_mixture,
    contest,
)
from dflop.compare.suite.mixtures import MIXTURES
from dflop.compare.suite.unseen_batches import geometric_mean
from dflop.errors import InfeasiblePlanError
from dflop.report.html_page import Drawing
from dflop.report.suite_plots import Series, bars_svg, save_bars
from dflop.report.tables import layout_text
from dflop.run.messages import Say
from dflop.units import percent, ratio, seconds

COLUMNS = (
    "model", "data", "uniform tuned", "default", "length-grouped", "reference", "token LPT", "tuned + our batches",
    "dflop", "95 %", "bound", "idle tuned", "idle dflop", "step / bound", "at its tp", "published",
)  # fmt: skip
NOTES = (
    "simulated: every number; no GPU was involved",
    "speed-ups are over `uniform tuned`: the best Megatron-style plan of all that fit, arrival order, equal counts; "
    "geometric means over unseen batches, the same for all",
    "default: largest tp, smallest pp, one sample a microbatch; reference: the literal rule of the released code with "
    "certified balance; token LPT: on the better of our layout and tuned uniform; bound: every GPU busy, best tp",
    "`!`: the plan does not fit in memory, or some batch exceeds what it has room for: it would run out of memory",
    "at its tp: step over the bound at the tp and recomputation that memory made our plan choose",
    "published: what two public summaries of the paper say, which contradict each other (secondary; 1.2 to 3.6 over "
    "all models is common to both); its baseline was tuned by hand, ours by simulation",
)


def run_paper(say: Say, cases: Sequence[Case] = CASES, mixtures: Sequence[str] = tuple(MIXTURES)) -> list[Contest]:
    """Contests of all cases on all mixtures."""
    found = []
    for name in mixtures:
        for case in cases:
            setting = make_setting(case, MIXTURES[name])
            say(f"{case.name}, {name}: {setting.num_gpus} GPUs, costs {setting.cost_name}")
            try:
                found.append(contest(setting, say))
            except InfeasiblePlanError as error:
                say(f"{case.name}, {name}: left out, {error}")
    return found


def paper_rows(contests: Sequence[Contest]) -> list[tuple[str, ...]]:
    """Rows of `COLUMNS`, and one of geometric means per mixture."""
    rows = [_row(one) for one in contests]
    for name in dict.fromkeys(c.setting.mixture for c in contests):
        rows.append(_mean_row(name, [c for c in contests if c.setting.mixture == name]))
    return rows


def plan_rows(contests: Sequence[Contest]) -> list[tuple[str, ...]]:
    """(model, data, competitor, layout, microbatches) of every plan."""
    rows: list[tuple[str, ...]] = []
    for one in contests:
        plans = one.plans
        for name, plan in ((TUNED, plans.tuned), (DEFAULT, plans.default), (REFERENCE, plans.reference),
                           (OURS, plans.ours)):  # fmt: skip
            if plan:
                where = (one.setting.name, one.setting.mixture)
                rows.append((*where, name, layout_text(plan), str(plan.num_microbatches)))
    return rows


def contest_numbers(contests: Sequence[Contest]) -> list[dict[str, object]]:
    """Everything in full, for programs; step times in seconds."""
    return [
        {
            "model": one.setting.name,
            "data": one.setting.mixture,
            "num_gpus": one.setting.num_gpus,
            "global_batch_size": one.setting.problem.global_batch_size,
            "step_s": {name: list(steps.step_s) for name, steps in one.steps.items()},
            "idle_frac": {name: steps.mean_idle_frac for name, steps in one.steps.items()},
            "num_over_cap": {name: steps.num_over_cap for name, steps in one.steps.items()},
            "bound_s": list(one.bound_s),
            "bound_of_our_tp_s": list(one.bound_of_ours_s),
            "reference_fits": one.plans.reference_fits,
            "plans": {
                name: {"layout": layout_text(plan), "num_microbatches": plan.num_microbatches, "plan_id": plan.plan_id}
                for name, plan in (
                    (TUNED, one.plans.tuned), (DEFAULT, one.plans.default), (REFERENCE, one.plans.reference),
                    (OURS, one.plans.ours),
                )
                if plan
            },
        }
        for one in contests
    ]  # fmt: skip


def save_paper_plot(contests: Sequence[Contest], path: Path) -> None:
    """Bars of all competitors.

    Raises:
        ConfigError: the suffix of the path is none that can be drawn.
    """
    series = paper_series(contests)
    groups = ["\n".join((*c.setting.name.split(" + "), c.setting.mixture)) for c in contests]
    save_bars(groups, series, [c.bound_speedup for c in contests], path, title_of(contests[0], "paper's models"))


def paper_series(contests: Sequence[Contest]) -> list[Series]:
    """Speed-ups of every competitor over the cases, ours with its intervals."""
    shown = (DEFAULT, GROUPED, REFERENCE, TOKEN_LPT, BATCHES)
    series = [Series(name, tuple(_value(c, name) for c in contests)) for name in shown]
    ours = [c.speedup(OURS) for c in contests]
    series.append(
        Series(
            OURS,
            tuple(s.mean if s else math.nan for s in ours),
            tuple(s.low if s else math.nan for s in ours),
            tuple(s.high if s else math.nan for s in ours),
        )
    )
    return series


def paper_drawings(contests: Sequence[Contest]) -> list[Drawing]:
    """Bars of all competitors for a page, a drawing per kind of data."""
    drawn = []
    for number, (mixture, of) in enumerate(by_mixture(contests)):
        groups = ["\n".join(textwrap.wrap(c.setting.name, 16)) for c in of]
        bounds = [c.bound_speedup for c in of]
        caption = (
            f"Times as fast as the tuned uniform plan on data `{mixture}`; lines: what no plan of a case can exceed"
        )
        svg = bars_svg(f"bars{number}", caption, groups, paper_series(of), bounds)
        drawn.append(Drawing(svg, f"{caption}; whiskers: 95 % intervals.", is_wide=True))
    return drawn


def title_of(one: Contest, what: str) -> str:
    """Says that it is simulated, and with which costs."""
    return f"Simulated, {what}; costs {one.setting.cost_name}"


def _row(one: Contest) -> tuple[str, ...]:
    ours, case = one.speedup(OURS), next((c for c in CASES if c.name == one.setting.name), None)
    published = case.published if case else None
    return (
        one.setting.name,
        one.setting.mixture,
        seconds(one.steps[TUNED].mean_s) + _mark(one, TUNED),
        *(_cell(one, name) for name in RIVALS),
        _cell(one, OURS),
        f"{ours.low:.2f}-{ours.high:.2f}" if ours and ours.has_interval else "-",
        ratio(one.bound_speedup),
        percent(one.steps[TUNED].mean_idle_frac),
        percent(one.steps[OURS].mean_idle_frac),
        ratio(one.over_bound),
        ratio(one.over_bound_of_ours),
        f"{published[0]}-{published[1]}" if published else "-",
    )


def _mean_row(mixture: str, contests: Sequence[Contest]) -> tuple[str, ...]:
    def mean(values: Sequence[float]) -> str:
        return ratio(geometric_mean(values)) if not any(map(math.isnan, values)) else "-"

    return (
        "geometric mean", mixture, "",
        *(mean([_value(c, name) for c in contests]) for name in (*RIVALS, OURS)),
        "",
        mean([c.bound_speedup for c in contests]),
        "", "",
        mean([c.over_bound for c in contests]),
        mean([c.over_bound_of_ours for c in contests]),
        "",
    )  # fmt: skip


def _value(one: Contest, name: str) -> float:
    found = one.speedup(name)
    return found.mean if found else math.nan


def _cell(one: Contest, name: str) -> str:
    return ratio(_value(one, name)) + (_mark(one, name) if name in one.steps else "")


def _mark(one: Contest, name: str) -> str:
    over = one.steps[name].num_over_cap > 0 or (name == REFERENCE and not one.plans.reference_fits)
    return "!" if over else ""

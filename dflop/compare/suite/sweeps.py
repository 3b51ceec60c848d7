"""Settings of the suites, each planned and judged: the paper's models, and sweeps of cluster, encoder and noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dflop.compare.suite.cases import CASES, GLOBAL_BATCH_SIZE, NUM_NODES, NUM_UNSEEN, Case, Setting, make_setting
from dflop.compare.suite.contest import Contest, compete, contest, encoder_share, make_contestants
from dflop.compare.suite.mixtures import HEAVY, MAIN, MIXTURES
from dflop.compare.suite.unseen_batches import Noise
from dflop.errors import InfeasiblePlanError
from dflop.run.messages import Say
from dflop.units import percent

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
FACTORS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
SIGMAS = (0.0, 0.05, 0.10, 0.15, 0.20, 0.25)
NUM_LARGE_UNSEEN = 3
"""Unseen batches of clusters beyond 16 nodes: they are large there."""


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of a suite."""

    sweep: str
    """What varies, as a key of `suite_figures.X_LABELS`; empty: nothing, the model is another."""
    x: float
    label: str
    found: Contest

    @property
    def line(self) -> tuple[str, str, str]:
        """What is joined up in a diagram: (model, data, sweep)."""
        return self.found.setting.name, self.found.setting.mixture, self.sweep

    def throughput(self, name: str) -> float:
        """Samples per second and GPU."""
        setting = self.found.setting
        return setting.problem.global_batch_size / (self.found.steps[name].mean_s * setting.num_gpus)


def run_paper(say: Say, cases: Sequence[Case] = CASES, mixtures: Sequence[str] = tuple(MIXTURES)) -> list[Point]:
    """The paper's models on 8 nodes of 8 A100, on every kind of data."""
    settings = (make_setting(case, MIXTURES[name]) for name in mixtures for case in cases)
    return [point for setting in settings for point in _points(say, "", 0.0, "", setting)]


def run_scaling(say: Say, case: Case = CASES[0], nodes: Sequence[int] = NODES) -> list[Point]:
    """Strong scaling (one global batch for all cluster sizes) and weak (as many samples per GPU everywhere)."""
    points = []
    for sweep in ("strong", "weak"):
        for n in nodes:
            setting = make_setting(
                case,
                MAIN,
                num_nodes=n,
                global_batch_size=GLOBAL_BATCH_SIZE if sweep == "strong" else GLOBAL_BATCH_SIZE // NUM_NODES * n,
                num_unseen=NUM_UNSEEN if n <= 16 else NUM_LARGE_UNSEEN,
            )
            points += _points(say, sweep, float(n), f"{n} nodes", setting)
    return points


def run_balance(say: Say, case: Case = CASES[0], factors: Sequence[float] = FACTORS) -> list[Point]:
    """The encoder an eighth to eight times as expensive, all else equal."""
    points = []
    for mixture in (MAIN, HEAVY):
        for factor in factors:
            setting = make_setting(case, mixture, encoder_factor=factor)
            label = f"encoder x {factor:g}, {percent(encoder_share(setting.problem))} of the work"
            points += _points(say, "balance", factor, label, setting)
    return points


def run_noise(say: Say, cases: Sequence[Case] = CASES[:2], sigmas: Sequence[float] = SIGMAS) -> list[Point]:
    """Plans and schedules from clean costs, executed with items that cost more or less than predicted."""
    points = []
    for setting in (make_setting(case, mixture) for case in cases for mixture in (MAIN, HEAVY)):
        say(f"{setting.name}, {setting.mixture}")
        plans = make_contestants(setting.problem, say)
        for sigma in sigmas:
            found = compete(setting, plans, noise=Noise(sigma, seed=2))
            points.append(Point("noise", sigma, f"{sigma * 100:.0f} % noise per item", found))
    return points


SUITES: Mapping[str, Callable[[Say], list[Point]]] = {
    "paper": run_paper,
    "scaling": run_scaling,
    "balance": run_balance,
    "noise": run_noise,
}


def _points(say: Say, sweep: str, x: float, label: str, setting: Setting) -> list[Point]:
    """One point, or none where nothing fits."""
    where = ", ".join(filter(None, (setting.name, setting.mixture, sweep, label)))
    say(f"{where}: {setting.num_gpus} GPUs, costs {setting.cost_name}")
    try:
        return [Point(sweep, x, label, contest(setting, say))]
    except InfeasiblePlanError as error:
        say(f"{where}: skipped, {error}")
        return []

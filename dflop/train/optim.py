"""AdamW, and Muon for matrices, for the parameters of one seat, with float32 states under global parameter names.

A 16-bit weight has 8 bits of mantissa: an update a few hundred times smaller than the weight would be rounded away,
step after step. So what is updated is always float32: the parameter itself, or a master copy of which the parameter
is the rounded value. Replicas may share the states out (`zero.py`): each owns rows of an embedding, and of other
parameters whole ones, as Muon orthogonalises the momentum of a whole matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from dflop.errors import ConfigError
from dflop.models.build import Stage
from dflop.parallel.topology import Groups, Seat
from dflop.records import Plan
from dflop.train.buckets import Owners
from dflop.train.parameter_groups import MUON, is_hidden_matrix, numbers_of
from dflop.train.zero import SharedWeights, owners_of, those_apart

if TYPE_CHECKING:
    from dflop.config import GroupConfig  # the engine is measured on machines without pydantic

State = dict[str, dict[str, torch.Tensor]]
"""Per global parameter name: `step`, `exp_avg`, `exp_avg_sq`, or Muon's `momentum_buffer`; `master` where the parameter
is not float32, and `ema` where an average is kept."""
AVERAGE = "ema"


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Numbers of AdamW (arXiv 1711.05101), in torch's meaning."""

    learning_rate: float
    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    ema_decay: float = 0.0
    """Share of the weights' average that stays in a step; 0: no average is kept."""
    rules: tuple[GroupConfig, ...] = ()
    """Which parameters have another learning rate or weight decay."""
    optimizer: str = "adamw"
    """Or `muon`: hidden matrices by Muon (arXiv 2502.16982), whose updates are scaled to the size of AdamW's."""


def make_optimizer(
    plan: Plan, seat: Seat, stages: Sequence[Stage], groups: Groups, settings: OptimizerSettings
) -> Optimizer:  # fmt: skip
    """The optimizer of a seat's parameters that train; AdamW updates a part of one like a whole.

    Args:
        plan: Says which modules share out their optimizer's states over the replicas.
        seat: This rank's place.
        stages: Its parameters; frozen ones are left alone, weight decay included.
        groups: Process groups.
        settings: Of AdamW.

    Raises:
        ConfigError: Muon under a plan that cuts matrices.
    """
    trained = {n: p for stage in stages for n, p in stage.names.items() if p.requires_grad}
    modules = {n: part.module for part, stage in zip(seat.parts, stages, strict=True) for n in stage.names}
    tp = plan.module(seat.module).parallel.tp
    if (
        settings.optimizer == MUON
        and trained
        and (tp > 1 or any(n in stage.shards for stage in stages for n in trained))
    ):
        cut = f"tp {tp}" if tp > 1 else "sharded parameters (FSDP2)"
        raise ConfigError(
            f"Muon updates whole matrices, and the plan cuts those of `{seat.module}`: {cut}", where="train.optimizer",
            hint="adamw, or plan again: with muon the planner keeps matrices whole",
        )  # fmt: skip
    owners = owners_of(plan, seat, stages)
    shared = SharedWeights(stages, owners, groups.replicas, those_apart(stages, groups)) if owners else None
    return Optimizer(trained, settings, shared, modules)


class Optimizer:
    """AdamW and Muon over named parameters.

    Args:
        parameters: Those that train, by global name.
        settings: Of AdamW.
        shared: Those of them that replicas share out the updates of; what is missing, all update.
        modules: That each belongs to, for the rules of `settings`.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings, shared: SharedWeights | None = None,
        modules: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.parameters, self._shared = dict(parameters), shared
        self.owners: Owners = shared.owners if shared else {}
        found = {name: shared.rows(name, p) if shared else () for name, p in self.parameters.items()}
        self._rows = {name: rows for name, rows in found.items() if rows is not None}
        # Of a float32 weight the rows themselves, else a master copy.
        self._updated = {name: self.parameters[name].detach()[rows].float() for name, rows in self._rows.items()}
        self._of_torch = _of_torch(self._updated, settings, modules or {})
        self._ema_decay = settings.ema_decay
        self._average = {n: p.detach().clone() for n, p in self._updated.items()} if settings.ema_decay else {}

    def step(self, lr: float) -> None:
        """Update the weights from `.grad`; collective over the replicas where they share out the states.

        A forward pass may come next; what reads weights otherwise must `wait`.

        Args:
            lr: Learning rate of this step, of parameters that no rule gives another one.
        """
        self.wait()
        if self._updated:
            for name, updated in self._updated.items():
                gradient = self.parameters[name].grad
                updated.grad = None if gradient is None else gradient[self._rows[name]].float()
            for optimizer in self._of_torch:
                for group in optimizer.param_groups:
                    group["lr"] = lr * group["lr_scale"]
                optimizer.step()
            if self._average:
                weights = [self._updated[name].detach() for name in self._average]
                torch._foreach_lerp_([*self._average.values()], weights, 1 - self._ema_decay)
            self._round()
        if self._shared is not None:
            self._shared.send()

    def wait(self) -> None:
        """Until this rank's weights are what the last step has made of them."""
        if self._shared is not None:
            self._shared.wait()

    def state(self) -> State:
        """What a checkpoint must hold, of the parameters that this rank updates: live tensors, zeros before a step.

        Weights, which a checkpoint holds, too, are waited for. To load one, fill these tensors, which takes no memory,
        and hand them to `load_state`: a load that fails half-way spoils the optimizer.
        """
        self.wait()
        found: State = {}
        moments = {tensor: kept for optimizer in self._of_torch for tensor, kept in optimizer.state.items()}
        for name, updated in self._updated.items():
            found[name] = dict(moments[updated])
            if self._has_master(name):
                found[name]["master"] = updated
            if name in self._average:
                found[name][AVERAGE] = self._average[name]
        return found

    def load_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Go on from a state; load the weights first.

        Args:
            state: As `state` returns it, of more parameters or of fewer. Where a parameter or one of its tensors is
                missing, moments begin at zero, a master copy and an average with the weight.
        """
        for name, kept in self.state().items():
            given = state.get(name, {})
            for key, tensor in kept.items():
                is_weight = key in ("master", AVERAGE)
                fresh = self.parameters[name].detach()[self._rows[name]] if is_weight else torch.zeros_like(tensor)
                tensor.detach().copy_(given.get(key, fresh))
        self._round()

    def _round(self) -> None:
        """Set weights that are not float32 to the nearest value of their master copies."""
        with torch.no_grad():
            for name, updated in self._updated.items():
                if self._has_master(name):
                    self.parameters[name][self._rows[name]].copy_(updated)

    def _has_master(self, name: str) -> bool:
        return self.parameters[name].dtype != torch.float32

    @property
    def rows(self) -> dict[str, tuple[int, int]]:
        """`[first, end)` of what this rank updates of a parameter that it holds more of."""
        return {name: (rows[0].start, rows[0].stop) for name, rows in self._rows.items() if rows}


def _of_torch(
    tensors: Mapping[str, torch.Tensor], settings: OptimizerSettings, modules: Mapping[str, str]
) -> list[torch.optim.Optimizer]:
    """Optimizers of the tensors, with their states allocated; torch refuses one without tensors."""
    alike: dict[bool, dict[tuple[float, float], list[torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        numbers = numbers_of(settings.rules, settings.weight_decay, modules.get(name, ""), name, tensor.ndim)
        is_muons = settings.optimizer == MUON and is_hidden_matrix(name, tensor.ndim)
        alike.setdefault(is_muons, {}).setdefault(numbers, []).append(tensor)
    found: list[torch.optim.Optimizer] = []
    for is_muons, by_numbers in alike.items():
        members = [tensor for of_group in by_numbers.values() for tensor in of_group]
        groups = [{"params": t, "lr_scale": s, "weight_decay": decay} for (s, decay), t in by_numbers.items()]
        if is_muons:
            found.append(torch.optim.Muon(groups, settings.learning_rate, adjust_lr_fn="match_rms_adamw"))
        else:
            found.append(torch.optim.AdamW(
                groups, settings.learning_rate, betas=settings.betas, eps=settings.eps,
                # Without a temporary; on a CPU its roundings depend on where a tensor is cut.
                fused=members[0].is_cuda or None,
            ))  # fmt: skip
        for tensor in members:
            names = ("momentum_buffer",) if is_muons else ("exp_avg", "exp_avg_sq")
            count = {} if is_muons else {"step": torch.zeros((), dtype=torch.float32)}
            found[-1].state[tensor] = count | {name: torch.zeros_like(tensor.detach()) for name in names}
    return found

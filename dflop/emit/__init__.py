"""Plans as files that other programs read: one small file per target.

A target is a function from a plan and its cluster to text. Where it accepts fewer plans than this project's engine,
what is emitted is the best of what it accepts: MIMO's rules are constraints of the search, and for trainers that pack
samples a plan is searched as for the baselines (`dflop.compare.experts.other_trainers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dflop.emit.json_plan import emit_json
from dflop.emit.megatron_bridge import emit_megatron_bridge
from dflop.emit.megatron_mimo import emit_megatron_mimo
from dflop.emit.mimo_rules import MimoRules
from dflop.emit.packing_trainers import emit_ms_swift, emit_torchtitan, emit_veomni
from dflop.emit.torchrun import emit_torchrun
from dflop.errors import ConfigError, did_you_mean
from dflop.records import ClusterSpec, Plan

Emitter = Callable[[Plan, ClusterSpec], str]

EMITTERS: Mapping[str, Emitter] = {
    "json": emit_json,
    "megatron-bridge": emit_megatron_bridge,
    "megatron-mimo": emit_megatron_mimo,
    "ms-swift": emit_ms_swift,
    "torchrun": emit_torchrun,
    "torchtitan": emit_torchtitan,
    "veomni": emit_veomni,
}
RULES: Mapping[str, MimoRules] = {"megatron-mimo": MimoRules()}
"""Rules of targets that do not accept every plan."""


def emitter(target: str) -> Emitter:
    """The function of a target; asked before a plan is searched, a wrong name costs no time.

    Raises:
        ConfigError: no such target; names the valid ones.
    """
    if target not in EMITTERS:
        raise ConfigError(f"cannot emit `{target}`", where="--emit", hint=did_you_mean(target, EMITTERS))
    return EMITTERS[target]

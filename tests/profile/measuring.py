"""The row of a group that one probe runs at one visit."""

from __future__ import annotations

from dflop.profile.groups import ProbeGroup
from dflop.profile.probe import GroupVisits, ModuleProbe
from dflop.records import Measurement


def measure(probe: ModuleProbe, group: ProbeGroup, num_repeats: int = 2) -> Measurement:
    """Its row; status `oom` where it does not fit."""
    visits = GroupVisits([probe], group)
    visits.visit(num_repeats)
    return visits.rows()[0]

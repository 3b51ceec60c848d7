"""What a campaign draws from: faults are drawn again by their seed, and places to die at exist."""

import random
from pathlib import Path

from tests.chaos import __main__ as chaos
from tests.chaos import faults, slurm_faults
from tests.chaos.play import Play


def test_faults_are_met_and_drawn_again_by_their_seed_and_places_to_die_at_exist(tmp_path: Path) -> None:
    drawn, again = ([[s.fault.name for s in chaos.draw(3, n, faults.FAULTS)[0]] for n in range(50)] for _ in range(2))
    assert drawn == again
    assert len({name for names in drawn for name in names}) >= 0.9 * len(faults.FAULTS)
    assert {fault.when for fault in (*faults.FAULTS, *slurm_faults.FAULTS)} <= faults.MOMENTS.keys()
    places = [fault.dies_at for fault in faults.FAULTS if fault.dies_at]
    code = f"from tests.chaos.dying import arm\nfor place in {places}: arm(place)"
    assert Play(tmp_path, random.Random(0), ()).also("-c", code).wait() == 0

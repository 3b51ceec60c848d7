"""Every door to the outside, by name. A new one is a `Target` in one of these files."""

from tests.fuzz.target import Target
from tests.fuzz.targets import configuration, dataset, media, runs, screen, store

ROOMS = (configuration, dataset, media, store, runs, screen)
TARGETS: dict[str, Target] = {target.name: target for room in ROOMS for target in room.TARGETS}

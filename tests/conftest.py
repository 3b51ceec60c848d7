from __future__ import annotations

from hypothesis import settings

# A shared machine makes any single example slow now and then; pytest-timeout catches what really hangs.
settings.register_profile("dflop", deadline=None)
settings.load_profile("dflop")

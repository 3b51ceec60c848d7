from __future__ import annotations

import os

from hypothesis import settings

# Two workers with a thread per core each wait for one another in spin loops: up to 60 times as slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shared machine makes any single example slow now and then; pytest-timeout catches what really hangs.
settings.register_profile("dflop", deadline=None)
settings.load_profile("dflop")

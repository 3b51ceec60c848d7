"""Plans and policies side by side, simulated on one's own data: `contest.py`, with rows and page in `trainers.py`.

Speedups are paired by global batch: geometric means with Student's 95 % interval on logarithms
(`dflop/records/speedup.py`; the same formula as the view `v_speedup`, which a run's comparison is read from, and tests
hold both equal). With fewer than three batches there is no interval and no winner. What planning alone simulated is
called planned (`planned_speedup`) and has no interval, for a plan keeps means.
"""

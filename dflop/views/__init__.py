"""One run's rows -> the values that `report` draws, explanations of plans, traces.

`explain_plan.py` schedules the sampled batches under the chosen plan once more, so that busy and idle time and `sync_s`
of a stage add up to `predicted_step_s`. "If all microbatches were alike" replaces the seconds of every microbatch of a
stage by their mean: what still idles is the pipeline's own, the rest comes from the data. Before the history of a run
is read, waiting rows are brought in, unless somebody else is at it (`freshen` in `dflop/store/ingest.py`).
"""

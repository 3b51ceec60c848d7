"""A `Plan` and its `StepPlan`s -> weights, checkpoints, observations: our own 1F1B engine.

A step of a rank is `loop.py`: take what the feed thread has prepared, run `engine.py`, `reduce.py`, `optim.py`. The
engine is small because StepPlans carry the knowledge: both ends of a message derive its rows and shape from them
(`routes.py`), with no header and no handshake, and empty messages are not sent. An encoder that
yields another number of rows than planned stops the job with both numbers.

- Seats: a rank has parts, layers of one module each: one for every module of its grid
  with layers on its stage. Encoders run beside each other and feed the LLM's first stage. Parameters keep their global
  names whatever stage holds them; reduction, checkpoints and export speak only those.
- Loss: the last stage sums cross entropy and divides by the supervised tokens of the healthy samples of the *global*
  batch. Gradients of microbatches and replicas just add: a SUM in float32, never a mean.
- Routers' loss (`router_loss.py`): every microbatch adds its part, by the shares of experts of the step before.
- A received tensor is a leaf; its gradient goes back on a second process group, so tags of both directions stay apart.
- Memory: recomputation (`dflop/models/ways.py`), ZeRO-1 (`zero.py`), FSDP2 (`fsdp.py`). What AdamW updates is float32.
- Input: `feed.py` prepares the next step in a thread, `prefetch.py` decodes media in processes, steps ahead. All
  ranks agree before the step which samples are broken; those carry no loss, and the denominator leaves them out.
- Plans: `plan_source.py` waits for the scheduler up to a share of the step, then makes a quick plan. The first writer
  wins, so all ranks run the same one.
- Loss or gradients that are not finite: no rank updates in that step; three in a row end the job (`finite.py`). No
  checkpoint is written of weights or moments that are not finite.
- Checkpoints (`checkpoint.py`, `manifest.py`, `blocks.py`): torch's distributed format under global names, so that
  any plan loads what any other wrote. A full disk costs that checkpoint, not the run. What the run says of the steps
  that a checkpoint leaves behind is on disk before it counts.
- Ends: SIGUSR2 or SIGTERM to any rank raises a flag (`signals.py`) that ranks sum in an all-reduce of the step; all
  stop after the same step, leave a checkpoint and exit with 75. A rank that raises, dies or hangs ends all others, and
  the first cause is what everybody prints (`watchdog.py`, `liveness.py`).
- Telling: a `StepObservation` per rank and step, made in `Trainer._observe`; in every `train.trace_every_steps`th step
  a `RankSpan` for everything in it (`step_trace.py`). `dflop/jobs/telemetry.py` writes them, off the training path.
"""

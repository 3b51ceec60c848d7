"""The command line. A body is a few lines, and heavy imports stay inside it: `dflop --help` must be instant."""

from __future__ import annotations

import sys

from cyclopts import App

from dflop import __version__
from dflop.cli import compare, cost, data, drive, export, history, pipeline, plan, replan, runs, sql, store
from dflop.errors import DflopError

app = App(name="dflop", version=__version__, help="Data-aware training of multimodal LLMs on Slurm clusters.")
commands = (
    drive.run, drive.train, drive.serve, plan.plan, compare.compare, pipeline.report, history.history, replan.replan,
    export.export, pipeline.config, pipeline.demo_data, cost.profile, sql.sql, runs.cancel, runs.reap,
)  # fmt: skip
for command in commands:
    app.command(command)
app.command(cost.app)
app.command(data.app)
app.command(runs.app)
app.command(store.app)


def main() -> None:
    """Entry point: turns errors into three lines and an exit code."""
    try:
        app(sys.argv[1:])
    except DflopError as error:
        print(f"dflop: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has seen enough; Python would complain on exit
        raise SystemExit(0) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None

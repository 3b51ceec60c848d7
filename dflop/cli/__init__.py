"""The command line. A body is a few lines, and heavy imports stay inside it: `dflop --help` must be instant."""

from __future__ import annotations

import os
import sys

from cyclopts import App, CycloptsError, Parameter

from dflop import __version__, errors
from dflop.cli import compare, config, doctor, init, model, outputs, plan, profiles, run, runs, sampler, sql, store
from dflop.cli.common import check_value
from dflop.cli.usage import missing_package, usage_error
from dflop.errors import DflopError
from dflop.progress import quiet_imports

app = App(
    name="dflop",
    version=__version__,
    help=(
        "Data-aware training of multimodal LLMs on Slurm clusters.\n\nExample: dflop run configs/demo.yaml, then "
        "dflop sql --list. Your own data: dflop init, dflop config validate, dflop doctor."
    ),
    default_parameter=Parameter(negative=(), validator=check_value),  # no --no-json
)
commands = (
    run.run, run.train, run.serve, plan.plan, compare.compare, outputs.report, outputs.trace, init.demo_data,
    profiles.profile, sql.sql, init.init, doctor.doctor, init.completion, runs.cancel, runs.reap,
)  # fmt: skip
for command in commands:
    app.command(command)
for also_runs in (outputs.history, outputs.replan, outputs.export, outputs.chat):
    runs.app.command(also_runs)
    app.command(also_runs)
for group in (config.app, profiles.cost, profiles.data, model.app, runs.app, sampler.app, store.app):
    app.command(group)


def main() -> None:
    """Entry point: turns errors into three lines and an exit code."""
    os.umask(os.umask(0o077) | 0o002)  # a store may be a group's, nothing is everybody's; jobs inherit it
    quiet_imports()
    try:
        words = sys.argv[1:]
        app([*map(sql.as_text, words)] if words[:1] == ["sql"] else words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        _end(usage_error(error))
    except DflopError as error:
        _end(error)
    except ModuleNotFoundError as error:
        if (of_extra := missing_package(error)) is None:
            raise
        _end(of_extra)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has seen enough; Python would complain on exit
        raise SystemExit(0) from None
    except OSError as error:
        if (of_disk := errors.of_disk(error)) is None:
            raise
        _end(of_disk)
    except KeyboardInterrupt:
        print("dflop: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def _end(error: DflopError) -> None:
    print(f"dflop: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code) from None

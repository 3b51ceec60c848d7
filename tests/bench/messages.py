"""NCCL's rules on what our plans of the suite send: `python -m tests.bench.messages [--suite NAME] [--only TEXT]`.

Every rank's engine runs a step of a setting's first unseen batch with stand-ins for stages. What it asks for is held
against the rules of `tests/train/nccl_rules.py`. Minutes; no GPU and no processes.
"""

import sys
from dataclasses import replace
from pathlib import Path

from dflop.compare.unseen_batches import TRAINING_EFFORT
from dflop.parallel.topology import MAX_MESSAGE_CTAS
from dflop.plan.search import plan_problem
from dflop.report.tables import layout_text
from dflop.schedule.step_scheduler import schedule_step
from tests.bench.cases import CASES, suite_family
from tests.bench.command import options
from tests.bench.figures import conclude
from tests.bench.mixtures import MIXTURES
from tests.bench.suites import SUITES, Row
from tests.train.nccl_rules import broken, communicators, most_pending
from tests.train.recorded import recorded

BUFFER_BYTES = 10 << 20
"""Of a channel that receives; see `MAX_MESSAGE_CTAS`."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--suite", choices=SUITES, default="paper")
    parser.add_argument("--sizes", type=Path, help="table of real sample sizes, which the suite `real` draws from")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the settings in whose names this is")
    args = parser.parse_args()
    rows = [obeys(row) for row in SUITES[args.suite](args.sizes) if args.only in row.label]
    for row in rows:
        print(" | ".join(map(str, row.values())))
    bounds = [(f"{row['label']}: obeys NCCL's rules", not row["broken"]) for row in rows]
    conclude({"suite": args.suite, "cases": rows}, bounds, args.json)


def obeys(row: Row) -> dict[str, object]:
    """What a step of our plan sends, and which rule it breaks."""
    setting = row.setting
    space = replace(setting.problem.space, host_bytes=row.host_bytes, host_bytes_per_s=row.host_bytes_per_s)
    problem = replace(setting.problem, space=space)
    plan, batch = plan_problem(problem)[0], [replace(s, sample_index=n) for n, s in enumerate(setting.unseen[0])]
    step_plan = schedule_step(run_id="suite", step=0, plan=plan, batch=batch, cost=problem.cost, effort=TRAINING_EFFORT)
    case = next(case for case in CASES if case.name == setting.name)
    calls = recorded(plan, suite_family(case, MIXTURES[setting.mixture]), batch, step_plan)
    receiving = max(len({(c.group, c.peer) for c in of if c.kind == "receive"}) for of in calls.values())
    found = {
        "label": row.label,
        "layout": layout_text(plan),
        "messages": sum(call.kind == "send" for of in calls.values() for call in of),
        "communicators_per_rank": max(map(len, communicators(calls).values())),
        "most_pending": max(most_pending(calls).values()),
        "buffer_bytes": receiving * MAX_MESSAGE_CTAS * BUFFER_BYTES,
        "broken": broken(plan, calls)[:1],
    }
    print(found, file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()

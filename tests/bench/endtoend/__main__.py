"""Whole trainings beside each other: `python -m tests.bench.endtoend [--full] [--media DIR] [--json FILE]`.

The demo's model is trained on the demo's data and, with --media, on a folder of real media, by 2 and by 4 processes:
once by dflop with all it has (profiles, plan, scheduler, corrections), and once each under two data-blind plans in
arrival order. Same initial weights, same global batches in the same order; the losses must be equal to rounding. The
trainings take turns, a step each, and whoever is not in turn is stopped: `turns.py`. Everything is measured on this
machine's processor but what is called simulated.

Processes share cores: four on two cores cannot all compute at once, so a wait for others costs little there, as a
process that waits leaves its core to one that does not. Balance can gain less than on devices of their own.

One seed without --full, which has no interval, and with --media two of the four pairs of data and processes. With
--json, cases that the file has already are not measured again.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from dflop.launch.kernels import kernel_environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="five seeds and more steps: half an hour")
    parser.add_argument("--media", type=Path, help="folder of media with llava_demo.jsonl; default: demo data alone")
    parser.add_argument("--sizes", type=Path, help="not used: sizes without media cannot be trained on")
    parser.add_argument("--json", type=Path, help="write the figures there, too, and go on where the file ends")
    args = parser.parse_args()
    if args.sizes:
        print("--sizes is not used here: sizes without media cannot be trained on", file=sys.stderr)
    os.environ |= kernel_environment(os.environ)  # before anything is imported that has kernels
    from tests.bench.endtoend import campaign
    from tests.bench.endtoend.outcome import NUM_WARM_UP_STEPS
    from tests.bench.endtoend.page import tables
    from tests.bench.endtoend.summary import summaries

    content = campaign.run(campaign.FULL if args.full else campaign.SMALL, args.media, args.json)
    print("\n\n".join(tables(content).values()))
    for s in summaries(content["seeds"]):
        if s.num_quick_plans:
            print(f"{s.data}, {s.num_processes} processes: {s.num_quick_plans} of {s.num_steps} steps ran a quick plan")
    print(f"\n{content['machine']}, first {NUM_WARM_UP_STEPS} steps not counted, {content['settings']}")


if __name__ == "__main__":
    main()

"""Media rules of every processor of transformers against real calls: `python -m tests.bench.model_tokens [CLASS ...]`.

A row per processor class and medium: the way that equals real calls on the whole grid (60 pictures, 10 clips, 10
sounds), or why the medium is refused. Classes have their default settings, clips are not sampled. Processor seconds
are of the whole check. Needs `make references`.
"""

import sys
import time
import warnings
from pathlib import Path
from typing import Any

from tests.bench import command
from tests.bench.figures import json_text, machine

TORCHVISION = Path(sys.prefix) / "clients" / "torchvision"


def main() -> None:
    parser = command.options(__doc__)
    parser.add_argument("classes", nargs="*", metavar="CLASS")
    args = parser.parse_args()
    rows = measured(args.classes)
    counts = {way: sum(row["way"] == way for row in rows) for way in ("sizes", "shapes", "fitted", "calls", "refused")}
    print(", ".join(f"{way} {number}" for way, number in counts.items()), f"of {len(rows)}")
    if args.json:
        args.json.write_text(json_text({**machine(), "rows": rows, "counts": counts}))


def measured(names: list[str]) -> list[dict[str, Any]]:
    """A row per class and medium, printed as it is measured."""
    sys.path.append(str(TORCHVISION))
    warnings.filterwarnings("ignore")
    from tests.models.with_torchvision import import_torchvision

    library = import_torchvision()
    import torch
    import transformers

    from tests.models import stand_in_processors as stand_ins

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(2)
    rows = []
    for name, kinds in stand_ins.classes().items():
        if names and name not in names:
            continue
        started = time.process_time()
        for row in _rows(stand_ins, name, kinds):
            row |= {"class": name, "types": kinds, "processor_s": round(time.process_time() - started, 1)}
            started = time.process_time()
            rows.append(row)
            print(
                f"{name:32s} {row['medium']:6s} {row['way']:8s} {row['processor_s']:5.1f} s  {row['why']}", flush=True
            )
    del library
    return rows


def _rows(stand_ins: Any, name: str, kinds: list[str]) -> Any:
    from dflop.models.generic.media_check import check_medium, grid
    from dflop.models.generic.media_processor import MediaProcessor

    try:
        processor = MediaProcessor(stand_ins.make_processor(name, kinds))
    except Exception as error:
        yield {"medium": "all", "way": "refused", "why": f"not made: {' '.join(str(error).split())[:160]}", "items": 0}
        return
    for kind in processor.kinds:
        check = check_medium(processor, kind, grid(kind))
        yield {
            "medium": kind,
            "way": check.rule.way if check.rule else "refused",
            "why": check.problem,
            "items": check.num_items,
        }


if __name__ == "__main__":
    main()

"""Media rules of every processor of transformers against real calls: `python -m tests.bench.model_tokens [CLASS ...]`.

A row per processor class and medium: the way that equals real calls on the whole grid (60 pictures, 10 clips, 10
sounds), or why the medium is refused, and what two items in a prompt change. Classes have their default settings.
Processor seconds are of the whole check, `item_ms` of counting one item of the grid by the rule. Needs
`make references`.
"""

import contextlib
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.bench import command
from tests.bench.figures import json_text, machine

TORCHVISION = Path(sys.prefix) / "clients" / "torchvision"


def main() -> None:
    parser = command.options(__doc__)
    parser.add_argument("classes", nargs="*", metavar="CLASS")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for row in measured(args.classes):
        rows.append(row)
        took = f"{row['processor_s']:5.1f} s {row['item_ms'] or 0:8.2f} ms an item"
        print(f"{row['class']:32s} {row['medium']:6s} {row['way']:8s} {took}  {row['why']}", flush=True)
        if args.json:
            about = {"machine": machine("transformers", "torch"), "counts": counts(rows)}
            args.json.write_text(json_text({**about, "rows": rows}))
    print(", ".join(f"{way} {number}" for way, number in counts(rows).items()), f"of {len(rows)}")


def counts(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Rows by way."""
    return {way: sum(row["way"] == way for row in rows) for way in ("sizes", "shapes", "fitted", "calls", "refused")}


def measured(names: list[str]) -> Iterator[dict[str, Any]]:
    """A row per class and medium."""
    sys.path.append(str(TORCHVISION))
    warnings.filterwarnings("ignore")
    from tests.models.with_torchvision import import_torchvision

    library = import_torchvision()
    import torch
    import transformers

    from tests.models import stand_in_processors as stand_ins

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name, kinds in stand_ins.classes().items():
        if names and name not in names:
            continue
        started = time.process_time()
        for row in _rows(stand_ins, name, kinds):
            yield {"class": name, "types": kinds, **row, "processor_s": round(time.process_time() - started, 1)}
            started = time.process_time()
    del library


def _rows(stand_ins: Any, name: str, kinds: list[str]) -> Any:
    from dflop.models.generic.media_check import check_medium, grid
    from dflop.models.generic.media_processor import MediaProcessor, one_line

    nothing: dict[str, Any] = {"medium": "all", "way": "refused", "items": 0, "item_ms": None}
    try:
        processor = MediaProcessor(stand_ins.make_processor(name, kinds))
    except Exception as error:
        yield {**nothing, "why": f"not made: {one_line(error)}"}
        return
    for kind in processor.kinds:
        check = check_medium(processor, kind, grid(kind))
        found = {"medium": kind, "items": check.num_items, "why": check.problem or check.several}
        if check.rule:
            found |= {"way": check.rule.way, "item_ms": _item_ms(check.rule, grid(kind))}
        yield nothing | found


def _item_ms(rule: Any, headers: Sequence[Any]) -> float:
    """Processor milliseconds in which a rule counts an item of the grid."""
    num, started = 0, time.process_time()
    for header in headers:
        with contextlib.suppress(Exception):  # what the processor refuses
            rule.expand(header)
            num += 1
    return round(1000 * (time.process_time() - started) / num, 2)


if __name__ == "__main__":
    main()

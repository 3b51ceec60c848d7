"""Every model type of transformers that takes images, video or sound, checked as `dflop model check` does.

    python -m tests.bench.models [--types TYPE ...] [--json FILE]

Default configs, corrected where they contradict themselves (`model_configs.py`), written to a folder as a release has
them. Each type in a process of its own: processor seconds and memory are that type's, above what imports take. Then it
is planned (`planned.py`) with its processor at default settings, fitted to the config. Needs `make references`.
"""

import json
import os
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dflop.errors import ConfigError
from dflop.models.generic.check import structure_of
from dflop.models.generic.classes import trained_config
from dflop.models.generic.exact import check_exactness
from dflop.models.generic.exactness import LIMIT, Exactness
from dflop.models.generic.folder import read_folder, reason
from dflop.models.generic.media_processor import MediaProcessor
from dflop.models.generic.values import Structure
from dflop.models.unsupported import media_types
from tests.bench.command import options
from tests.bench.figures import conclude
from tests.bench.markdown import table
from tests.bench.model_configs import config_of
from tests.bench.model_tokens import TORCHVISION
from tests.bench.planned import planned

LEAST_TRACED, LEAST_EXACT, LEAST_PLANNED, MOST_S, LARGE = 70, 50, 60, 120, 500e9
MOST_READ_S = 10
Row = dict[str, Any]
_WAYS = ("sizes", "shapes", "fitted", "calls")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--types", nargs="+", help="only these")
    args = parser.parse_args()
    sys.path.append(str(TORCHVISION))
    warnings.filterwarnings("ignore")
    from tests.models.with_torchvision import import_torchvision

    library = import_torchvision()
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    checked("qwen3_vl")  # imports what most types share, so that no type is charged for it
    rows = []
    with ThreadPoolExecutor(2) as pool:
        for row in pool.map(in_a_process, args.types or sorted(media_types())):
            rows.append(row)
            print(json.dumps(row), flush=True)
    del library
    bounds = bounds_of(rows) if not args.types else ()
    conclude({"transformers": transformers.__version__, "rows": rows}, bounds, args.json)


def bounds_of(rows: Sequence[Row]) -> list[tuple[str, bool]]:
    """(what must hold of all types, whether it does)."""
    traced = [row for row in rows if "num_params" in row]
    exact = [row for row in rows if row.get("is_exact")]
    plans = [row["planned"] for row in rows if "plan" in row.get("planned", {})]
    return [
        (f"{LEAST_TRACED} types traced, not {len(traced)}", len(traced) >= LEAST_TRACED),
        (f"{LEAST_EXACT} types exact, not {len(exact)}", len(exact) >= LEAST_EXACT),
        (f"{LEAST_PLANNED} types planned, not {len(plans)}", len(plans) >= LEAST_PLANNED),
        ("a model is read within 10 s, and again for nothing", all(
            of["read_s"] <= MOST_READ_S and of["again_s"] <= 0.1 for of in plans
        )),
        ("every traced parameter counted", all(row["num_counted_params"] == row["num_params"] for row in traced)),
        ("500B and more within 5 s and 1 GB", all(
            row["structure_s"] <= 5 and row["structure_mb"] <= 1000 for row in traced if row["num_params"] >= LARGE
        )),
    ]  # fmt: skip


def in_a_process(kind: str) -> Row:
    """What `checked` returns, of a process that ends with it."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_S, MOST_S))
        try:
            os.write(write, json.dumps(checked(kind)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        content = file.read()
    _, status = os.waitpid(pid, 0)
    row: Row = json.loads(content) if content else {"type": kind, "reason": f"its process ended with {status}"}
    return row


def checked(kind: str) -> Row:
    """One type's figures; `reason` where it is refused."""
    row: Row = {"type": kind}
    with tempfile.TemporaryDirectory(prefix="dflop-bench-") as name:
        folder = Path(name)
        try:
            config_of(kind).save_pretrained(folder)
        except Exception as error:  # a default that its own class refuses
            return row | {"reason": f"its default config cannot be made: {reason(error)}"}
        for file in ("processor_config.json", "tokenizer.json"):
            (folder / file).write_text("{}")
        started, held = time.process_time(), _peak_mb()
        try:
            config = read_folder(folder)
            structure = structure_of(config, str(folder))
        except ConfigError as error:
            return row | {"reason": error.what.replace(name, "")}
        row |= _structure_row(structure, time.process_time() - started, _peak_mb() - held)
        whole, processor, problem = config_of(kind), None, ""
        try:
            processor = fitted(kind, trained_config(whole))
        except Exception as error:  # whatever a class makes of its own defaults
            problem = f"no processor of default settings: {reason(error)}"
        started, held = time.process_time(), _peak_mb()
        found = check_exactness(config, structure, MediaProcessor(processor) if processor else None)
        row |= _exact_row(found, time.process_time() - started, _peak_mb() - held)
        if processor is None:
            return row | {"planned": {"problem": problem}}
        whole.save_pretrained(folder)
        return row | {"planned": planned(folder, processor)}


def fitted(kind: str, config: Any) -> Any:
    """The processor of a type at default settings, fitted to a config, which is given its ids of placeholders."""
    from tests.models.stand_in_processors import fit, processor_of

    return fit(processor_of(kind), config)


def _structure_row(structure: Structure, took_s: float, peak_mb: float) -> Row:
    return {
        "num_params": structure.num_params, "num_counted_params": structure.num_counted_params,
        "kinds": [f"{len(kind.layers)}x {kind.name}" for kind in structure.kinds],
        "degrees": list(structure.degrees),
        "encoders": [f"{of.path}: {of.num_layers}" for of in structure.encoders],
        "structure_s": round(took_s, 2), "structure_mb": round(peak_mb),
    }  # fmt: skip


def _exact_row(found: Exactness, took_s: float, peak_mb: float) -> Row:
    checks = [
        {"medium": of.medium, "is_exact": of.is_exact, "error": of.error, "float64_error": of.float64_error,
         "problem": of.problem, "worst": of.errors[0][0] if of.errors else ""}
        for of in found.checks
    ]  # fmt: skip
    return {"is_exact": found.is_exact, "checks": checks, "exact_s": round(took_s, 2), "exact_mb": round(peak_mb)}


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`models`: a summary and a row per type that was traced; `models-refused`: the others with the reason."""
    rows, traced = content["rows"], [row for row in content["rows"] if "num_params" in row]
    exact = [row for row in traced if row["is_exact"]]
    media = Counter(of["medium"] for row in exact for of in row["checks"] if of["is_exact"])
    plain = sum(all(of["error"] is None or of["error"] <= LIMIT for of in row["checks"]) for row in exact)
    seconds = sorted(row["structure_s"] + row["exact_s"] for row in traced)
    words = (
        f"transformers {content['transformers']}: of {len(rows)} types {len(traced)} are traced and {len(exact)} "
        f"exact, {plain} of them in float32 and the others in float64, where rounding is not amplified; "
        f"{media['image']} with pictures, {media['video']} with clips, {media['audio']} with sounds, their encoders' "
        "gradients among them. A check takes "
        f"{seconds[len(seconds) // 2]:.1f} s of processor time (median; {seconds[-1]:.1f} s at most); "
        f"tracing takes {max(row['structure_s'] for row in traced):.1f} s and "
        f"{max(row['structure_mb'] for row in traced)} MB at most."
    )
    plans = [row["planned"] for row in traced if "plan" in row["planned"]]
    reads = sorted(of["read_s"] for of in plans)
    words += (
        f" {len(plans)} are planned for 64 H100; what a plan needs of a model that was never seen takes "
        f"{reads[len(reads) // 2]:.1f} s of processor time (median; {reads[-1]:.1f} s at most), and nothing the second "
        f"time."
    )
    head = (
        "type",
        "parameters",
        "layers",
        "tp",
        "text",
        "pictures",
        "clips",
        "sounds",
        "seconds",
        "planned",
        "not exact, not checked",
    )
    refused = table(("type", "reason"), [(row["type"], row["reason"]) for row in rows if "num_params" not in row])
    return {"models": f"{words}\n\n{table(head, map(_cells, traced))}", "models-refused": refused}


def _cells(row: Row) -> tuple[str, ...]:
    by_medium = {of["medium"]: of for of in row["checks"]}
    open_ones = [f"{of['medium']}: {of['problem'] or of['worst']}" for of in row["checks"] if not of["is_exact"]]
    num = row["num_params"]
    return (
        row["type"], f"{num / 1e9:.2f}B", "; ".join(row["kinds"]), f"{row['degrees'][-1]}",
        *(_error_text(by_medium.get(medium)) for medium in ("text", "image", "video", "audio")),
        f"{row['structure_s'] + row['exact_s']:.1f}", _plan_text(row["planned"]), "; ".join(open_ones),
    )  # fmt: skip


def _plan_text(of: Mapping[str, Any]) -> str:
    """`split, read in 1.9 s; video refused`; or why there is no plan."""
    if "plan" not in of:
        return f"no: {of['problem']}"
    refused = [f"no {kind}" for kind, way in of["media"].items() if way not in _WAYS]
    refused += [f"not trained: {of['untrained']}"] if of.get("untrained") else []
    return "; ".join([f"{of['plan']}, read in {of['read_s']:.1f} s", *refused])


def _error_text(of: Mapping[str, Any] | None) -> str:
    """`7e-07`; of a check in float64 both errors; empty without a check."""
    if of is None or of["error"] is None:
        return ""
    in_float64 = "" if of["float64_error"] is None else f" (float64 {of['float64_error']:.0e})"
    return f"{of['error']:.0e}{in_float64}{'' if of['is_exact'] else ' differs'}"


if __name__ == "__main__":
    sys.exit(main())

"""Time real-size stages on one device for a replay of whole steps: `python -m tests.gpu.real_steps --out FOLDER`.

As `real_size`, for whoever has a GPU: torch, transformers, numpy, pyarrow and PyYAML, nothing else. Per model it writes

- `MODEL.parquet`: `Measurement` rows of every module at depths 1 and 2 and many sizes, trained and recomputed;
- `MODEL.stages.parquet`: rows of stages as deep as plans cut them, which tell what adding up layers is worth;
- `MODEL.json`: the model, the hardware and the versions that the times belong to.

`--device cpu --tiny` runs the same with a model that means nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import yaml

from dflop.models import load_family
from dflop.profile.groups import probe_groups
from dflop.profile.hardware import hardware_name, software_name
from dflop.profile.probe import ModuleProbe
from dflop.records import LLM, Measurement
from dflop.store import schema
from tests.gpu.real_size import ROOT, make_shapes, measure, settings_of, token_config
from tests.models.tiny_families import LLAVA

MODELS = ("llava_onevision_qwen2_5_7b", "llava_onevision_llama3_8b", "internvl2_5_8b", "qwen2_audio_7b")
"""SigLIP-so400m, InternViT-300M and a Whisper-like encoder under Qwen2.5-7B, Llama-3-8B, InternLM and Qwen-7B."""
WAYS = ("train", "recompute")
LLM_STAGE_LAYERS = 7
"""Of 28 on 4 stages, of 32 on five or so; encoders are timed whole."""
NUM_STAGE_GROUPS = 6
TINY: Mapping[str, Any] = {
    "family": "llava_onevision", "dtype": "float32", "media": {"video_frames": 4},
    "hf_config": {**LLAVA, "vision_config": {**LLAVA["vision_config"], "num_hidden_layers": 4}},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all of them")
    parser.add_argument("--budget-s", type=float, default=120, help="per model, without the stages")
    parser.add_argument("--max-samples", type=int, default=16, help="of a microbatch")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead, to see whether all of this runs")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)  # times are those of one thread
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("tiny",) if args.tiny else args.model or MODELS:
        model = TINY if args.tiny else yaml.safe_load((ROOT / "configs" / "models" / f"{name}.yaml").read_text())
        record(name, model, args.out, torch.device(args.device), args.budget_s, args.max_samples)


def record(
    name: str, model: Mapping[str, Any], folder: Path, device: torch.device, budget_s: float, max_samples: int
) -> None:
    """Write the three files of a model."""
    rows = measure(name, model, device, budget_s, WAYS, max_samples)
    stages = list(measure_stages(name, model, device, max_samples))
    pq.write_table(schema.to_table(Measurement, rows), folder / f"{name}.parquet")
    pq.write_table(schema.to_table(Measurement, stages), folder / f"{name}.stages.parquet")
    (folder / f"{name}.json").write_text(json.dumps({"model": {**model}, **circumstances(device)}, indent=1))
    print(f"{folder / name}.parquet: {len(rows)} probes, {len(stages)} stages, {rows[0].hardware}, {rows[0].software}")


def measure_stages(
    name: str, model: Mapping[str, Any], device: torch.device, max_samples: int
) -> Iterator[Measurement]:  # fmt: skip
    """Rows of one deep stage per module on a few groups; what does not fit in memory is a row that says so."""
    family = load_family(model["family"], model.get("hf_config", {}), model.get("media", {}))
    shapes, vocab_size = make_shapes(family, 400, seed=1), int(family.configs[LLM]["vocab_size"])
    for spec in family.specs():
        depth = min(LLM_STAGE_LAYERS, spec.num_layers) if spec.module == LLM else spec.num_layers
        settings = settings_of(name, model, device)
        probe = ModuleProbe(family, token_config(family), vocab_size, spec.module, depth, settings, device)
        groups = probe_groups(shapes, spec.module, num_groups=NUM_STAGE_GROUPS, max_samples=max_samples, seed=1)
        yield from (probe.measure(group) for group in groups)
        print(f"{name}, {spec.module}: a stage of {depth} layers", file=sys.stderr, flush=True)


def circumstances(device: torch.device) -> dict[str, Any]:
    """What the times depend on."""
    is_cuda = device.type == "cuda"
    return {
        "hardware": hardware_name(device.type),
        "software": software_name(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda if is_cuda else None,
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
        "date": datetime.now(UTC).date().isoformat(),
    }


if __name__ == "__main__":
    main()

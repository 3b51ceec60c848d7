"""Time the modules of real-size models on one GPU and keep the rows: `python -m tests.gpu.real_size --out FOLDER`.

One command for whoever has a device; it needs torch, transformers, numpy, pyarrow and PyYAML, no store and no other
part of dflop's environment. Writes one Parquet file of `Measurement` rows per model, and prints what it measured beside
the data sheet where the device has one. Samples are drawn, not read: sizes of photographs and clips, lognormal texts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import yaml

from dflop.cost.analytic import analytic_cost_tables
from dflop.cost.curve import evaluate
from dflop.cost.devices import find_device
from dflop.errors import CostError
from dflop.models import load_family
from dflop.models.family import Family
from dflop.models.ways import WAYS
from dflop.profile.hardware import hardware_name, software_name
from dflop.profile.probe import ProbeSettings
from dflop.profile.run import profile_model
from dflop.records import Measurement, MediaItem, SampleShape
from dflop.store import schema

ROOT = Path(__file__).parents[2]
MODELS = (
    "llava_onevision_qwen2_5_7b", "llava_onevision_llama3_8b", "internvl2_5_8b", "internvl2_5_78b", "qwen2_audio_7b",
    "qwen2_5_vl_7b", "qwen2_5_omni_7b",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", action="append", help="name in configs/models, or a file; default: seven of them")
    parser.add_argument("--budget-s", type=float, default=150, help="per model")
    parser.add_argument("--way", action="append", choices=sorted(WAYS), help="default: train and recompute")
    parser.add_argument("--max-samples", type=int, default=16)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in args.model or MODELS:
        path = Path(name) if name.endswith(".yaml") else ROOT / "configs" / "models" / f"{name}.yaml"
        model = yaml.safe_load(path.read_text())
        ways = args.way or ["train", "recompute"]
        rows = measure(path.stem, model, device, args.budget_s, ways, args.max_samples)
        file = args.out / f"{path.stem}.parquet"
        pq.write_table(schema.to_table(Measurement, rows), file)
        print(f"{file}: {len(rows)} rows on {rows[0].hardware}, {rows[0].software}")
        compare_with_data_sheet(path, rows)


def measure(
    name: str, model: Mapping[str, Any], device: torch.device, budget_s: float, ways: Sequence[str], max_samples: int
) -> list[Measurement]:
    """Rows of every module of a model file's content."""
    family = load_family(model["family"], model.get("hf_config", {}), model.get("media", {}))
    return list(
        profile_model(
            family,
            make_shapes(family, 400, seed=0),
            token_config=token_config(family),
            vocab_size=int(family.configs["llm"]["vocab_size"]),
            settings=settings_of(name, model, device),
            depths=(1, 2),
            num_probes=18,
            max_samples=max_samples,
            budget_s=budget_s,
            device=device,
            progress=lambda line: print(f"{name}, {line}", file=sys.stderr, flush=True),
            ways=[WAYS[way] for way in ways],
        )
    )


def settings_of(name: str, model: Mapping[str, Any], device: torch.device) -> ProbeSettings:
    """How every probe of a model is told and repeated."""
    hardware, software = hardware_name(device.type), software_name()
    return ProbeSettings(name, hardware, software, model.get("dtype", "bfloat16"), num_repeats=5)


def token_config(family: Family) -> dict[str, int]:
    """Ids of a family's special tokens, as no tokenizer has them."""
    tokens = {t for m in family.media_tokens.values() for t in (m.begin, m.pad, m.end) if t} | {*family.special_tokens}
    return family.token_ids({t: i + 10 for i, t in enumerate(sorted(tokens))})


def make_shapes(family: Family, num_samples: int, seed: int, scale: float = 1.0) -> list[SampleShape]:
    """Samples with up to three media of the kinds the family takes, and lognormal texts; all sizes times `scale`."""
    rng, kinds = np.random.default_rng(seed), sorted(family.media_tokens)
    shapes = []
    for index in range(num_samples):
        num_items = int(rng.choice([0, 1, 2, 3], p=[0.15, 0.6, 0.15, 0.1]))
        items = tuple(_item(family, str(rng.choice(kinds)), num_items, rng, scale) for _ in range(num_items))
        num_text = int(np.clip(scale * rng.lognormal(5.3, 0.9), 16, 6000))
        length = num_text + sum(i.num_rows for i in items)
        shapes.append(SampleShape("drawn", index, str(index), num_text, max(1, num_text // 2), length, items))
    return shapes


def _item(family: Family, kind: str, num_images: int, rng: np.random.Generator, scale: float) -> MediaItem:
    width, height = (int(scale * x) for x in rng.lognormal(6.6, 0.4, 2).clip(200, 2400))
    num_frames = {"image": 1, "video": int(scale * rng.integers(48, 900)), "audio": 0}[kind]
    duration_s = {"image": 0.0, "video": num_frames / 24, "audio": scale * float(rng.uniform(1.0, 29.0))}[kind]
    return place(family, kind, width, height, num_frames, duration_s, num_images=num_images)


def place(
    family: Family, kind: str, width_px: int, height_px: int, num_frames: int, duration_s: float, *,
    num_images: int, level: int = 0,
) -> MediaItem:  # fmt: skip
    """A media item as the family sees it."""
    p = family.place(
        kind, width_px=width_px, height_px=height_px, num_frames=num_frames, duration_s=duration_s,
        num_images=num_images, level=level,
    )  # fmt: skip
    return MediaItem(
        kind, "", width_px, height_px, num_frames, duration_s, p.module, p.grid, p.num_tokens, p.sum_sq_tokens,
        p.num_rows,
    )  # fmt: skip


def compare_with_data_sheet(path: Path, rows: list[Measurement]) -> None:
    """Median of measured over analytic seconds per module, way and depth."""
    model = yaml.safe_load(path.read_text())
    try:
        device = find_device(rows[0].hardware)
    except CostError:
        return
    specs = load_family(model["family"], model.get("hf_config", {}), model.get("media", {})).specs()
    tables = {(t.module, t.recompute): t for t in analytic_cost_tables(specs, device, profile_key="") if t.tp == 1}
    for key in dict.fromkeys((m.module, m.recompute, m.num_layers) for m in rows):
        table = tables[key[:2]]
        ratios = [
            (m.forward_s + m.backward_s)
            / sum(
                float(evaluate(terms, (m.num_items, m.num_tokens, m.sum_sq_tokens), m.num_layers, True))
                for terms in (table.forward_s, table.backward_s)
            )
            for m in rows
            if (m.module, m.recompute, m.num_layers) == key and m.status == "ok" and not m.is_frozen
        ]
        if ratios:
            print(f"  {key[0]}, recompute {key[1]}, {key[2]} layers: measured / data sheet {np.median(ratios):.2f}")


if __name__ == "__main__":
    main()

"""Run `dflop train` on one GPU as a user does: `python -m tests.gpu.job --out FOLDER`.

Makes a dataset of pictures and texts of very different sizes and a configuration of InternViT-300M with a decoder of
0.4 billion parameters, then: `doctor`; `train`, from the profiles to the report; `interrupted`, another run that is
stopped as by Ctrl-C behind its first checkpoint; `resumed`, the same command again. A phase that fails stops no other.

`FOLDER/job.jsonl` gets exit codes, seconds of every phase and what the store says of steps, memory and corrections;
`FOLDER/job.tar.gz` holds the configuration, logs and reports. Checkpoints, 14 bytes a parameter, lie in /dev/shm where
it has room, else in a temporary folder. `--device cpu --tiny` rehearses all of it with a model that means nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import yaml
from PIL import Image

from dflop.data.demo_content import CHAT_TOKENS, train_tokenizer
from tests.gpu.drawn import ROOT
from tests.gpu.evidence import circumstances, write
from tests.gpu.subject import DECODER, released, tiny

QWEN_05B = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
VIEWS = (
    "v_run_summary", "v_step", "v_stage_idle", "v_rank_time", "v_rank_memory", "v_plan", "v_prediction_error",
    "v_correction_latest", "run_event", "v_job", "v_cost_table_latest", "measurement",
)  # fmt: skip
"""What is asked of the store."""
KEPT = ("*.log", "*.yaml", "runs/*/*.html", "runs/*/*.json*", "runs/*/log/*", "runs/*/jobs/*/*")
ROOM_BYTES = 48 << 30
WARM = (
    "import os; from dflop.launch.kernels import kernel_environment as e; os.environ |= e(os.environ); "
    "from dflop.schedule.step_scheduler import warm; warm()"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=130, help="for all of it; what does not fit is left out")
    parser.add_argument("--layers", type=int, help="of encoder and decoder each; default: 24, on a disk 12")
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the GPU, over gloo")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead, to see whether all of this runs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end_s, shm, failed = time.monotonic() + args.seconds, Path("/dev/shm"), []
    has_room = not args.tiny and shm.is_dir() and shutil.disk_usage(shm).free > ROOM_BYTES
    args.layers = args.layers or (24 if has_room else 12)
    # On a machine that has none, kernels are compiled while profiles need none of them.
    subprocess.Popen([sys.executable, "-c", WARM], cwd=ROOT)
    with (
        tempfile.TemporaryDirectory(dir=shm if has_room else None, prefix="dflop-job-") as name,
        (args.out / "job.jsonl").open("a") as file,
        ThreadPoolExecutor(4) as pool,
    ):
        work = Path(name)
        write(file, {**circumstances(torch.device(args.device)), "work": name, "layers": args.layers})
        make_dataset(work / "data", *((96, 200) if args.tiny else (384, 2400)))
        train = ("train", str(write_config(work, args)))
        again = (*train, "--set", "name=again", "--set", "train.num_steps=10")
        doctor = pool.submit(run, work, "doctor", ("doctor", train[1]), end_s)
        for phase, command in (("train", train), ("interrupted", again), ("resumed", again)):
            begun_s = time.monotonic()
            code = run(work, phase, command, end_s - 12)
            write(file, {"phase": phase, "exit_code": code, "wall_s": time.monotonic() - begun_s})
            failed += [phase] if code and phase != "interrupted" else []
            pack(work, args.out / "job.tar.gz")
        write(file, {"phase": "doctor", "exit_code": doctor.result()})
        for view, found in zip(VIEWS, pool.map(lambda view: rows_of(work, view), VIEWS), strict=True):
            write(file, {"view": view, **found})
    return bool(failed)


def run(work: Path, phase: str, command: Sequence[str], end_s: float) -> int | str:
    """Exit code of a command, whose output goes to `PHASE.log`; what still runs at `end_s` is stopped as Ctrl-C does.

    `interrupted` is stopped when its run has a checkpoint.
    """
    if time.monotonic() >= end_s:
        return "no time"
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "dflop.cli", *command], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    with (work / f"{phase}.log").open("w") as log, ThreadPoolExecutor(1) as reader:
        reader.submit(keep_lines, process, log)
        while process.poll() is None:
            is_due = phase == "interrupted" and any(work.glob("runs/again*/checkpoints/step-*"))
            if is_due or time.monotonic() >= end_s:
                process.send_signal(signal.SIGINT)
                break
            time.sleep(0.1)
        try:
            return process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def keep_lines(process: subprocess.Popen[str], log: TextIO) -> None:
    """Every line with the seconds at which it came, on the terminal, too."""
    begun_s = time.monotonic()
    for line in process.stdout or ():
        timed = f"{time.monotonic() - begun_s:6.1f} {line}"
        print(timed, end="", flush=True)
        log.write(timed)
        log.flush()


def rows_of(work: Path, view: str) -> dict[str, Any]:
    """Rows that `dflop sql` prints, or its error."""
    question = ("sql", f"select * from {view}", "--store", str(work / "store"), "--json")
    command = [sys.executable, "-m", "dflop.cli", *question]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        return {"error": done.stderr[-2000:]}
    return {"rows": [json.loads(line) for line in done.stdout.splitlines()]}


def pack(work: Path, path: Path) -> None:
    """Configuration, logs and reports, the newest state of them."""
    with tarfile.open(path, "w:gz") as tar:
        for found in sorted({p for pattern in KEPT for p in work.glob(pattern) if p.is_file()}):
            if found.stat().st_size < 4 << 20:
                tar.add(found, found.relative_to(work))


def make_dataset(folder: Path, num_samples: int, longest_px: int) -> None:
    """A quarter of texts, else one picture to four, from 64 pixels to `longest_px`; answers of 8 to 3000 words."""
    rng, rows, texts = np.random.default_rng(0), list[dict[str, Any]](), list[str]()
    pages = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    words = re.sub(r"<[^>]*>", " ", pages).split()
    (folder / "media").mkdir(parents=True)
    pictures = [f"{number}.jpg" for number in range(num_samples // 2)]
    for picture in pictures:
        width, height = (int(side) for side in rng.lognormal(np.log(longest_px / 4), 0.7, 2).clip(64, longest_px))
        coarse = Image.fromarray(rng.integers(0, 255, (24, 24, 3), np.uint8))
        coarse.resize((width, height), Image.Resampling.BILINEAR).save(folder / "media" / picture, quality=80)
    for number in range(num_samples):
        num_pictures = int(rng.choice([0, 1, 2, 4], p=[0.25, 0.5, 0.15, 0.1]))
        length, start = int(np.clip(rng.lognormal(4.6, 1.2), 8, 3000)), int(rng.integers(len(words) - 3000))
        texts.append(" ".join(words[start : start + length]))
        turns = [("human", "<image>\n" * num_pictures + "What is to be seen?"), ("gpt", texts[-1])]
        row = {"id": str(number), "conversations": [{"from": who, "value": text} for who, text in turns]}
        rows.append(row | ({"image": [str(p) for p in rng.choice(pictures, num_pictures)]} if num_pictures else {}))
    (folder / "annotations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_tokenizer(texts, folder / "tokenizer.json", (*CHAT_TOKENS, "<img>", "<IMG_CONTEXT>", "</img>", "<video>"))


def write_config(work: Path, args: argparse.Namespace) -> Path:
    """The configuration of the run, all of whose files lie in `work`."""
    device, is_cuda, data = torch.device(args.device), args.device == "cuda", work / "data"
    model = dict((tiny if args.tiny else released)(device, work).whole)
    if not args.tiny:
        model["hf_config"]["vision_config"]["num_hidden_layers"] = args.layers
        model["hf_config"]["text_config"] = {**DECODER, **QWEN_05B, "num_hidden_layers": args.layers}
    memory_bytes = torch.cuda.get_device_properties(device).total_memory * 0.9 if is_cuda else 3 << 30
    config = {
        "name": "job", "model": model, "store": str(work / "store"), "runs": str(work / "runs"),
        "cluster": {"name": "here", "backend": "local", "num_processes_per_node": args.ranks, "device": args.device,
                    "ranks_per_gpu": args.ranks if is_cuda else 1,
                    "memory_per_process_gib": round(memory_bytes / args.ranks / 2**30, 1)},
        "dataset": {"annotations": str(data / "annotations.jsonl"), "media_root": str(data / "media"),
                    "tokenizer": str(data / "tokenizer.json"), "max_llm_tokens": 16384},
        "data_profile": {"num_workers": 4},
        "model_profile": {"budget_s": 5 if args.tiny else 25, "links_budget_s": 0},
        "plan": {"global_batch_size": 32, "microbatch_choices": [1, 2, 4, 8]},
        "train": {"num_steps": 12, "learning_rate": 1e-4, "warmup_steps": 2, "checkpoint_every": 5,
                  "trace_every_steps": 5},
        "replan": {"check_every_s": 3}, "compare": {"num_batches": 0},
    }  # fmt: skip
    (work / "job.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return work / "job.yaml"


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env bash
# Own data to an answer: the folder of a Hugging Face model, and photos with captions in a .jsonl.
# Commands: 1 for a layout, 1 for what it is worth. Decisions: 4 (model, data, device, number of GPUs), and a price if money is
# wanted; 36 s to the layout for 640 photos (two cores, no GPU). Before: 6.6 minutes and 7 decisions to a first answer, which was wrong.
set -euo pipefail
PS4='$ '
set -x
dflop plan model photos --device h100 --gpus 64
dflop compare model photos --device h100 --gpus 64 --usd-per-gpu-hour 2.5

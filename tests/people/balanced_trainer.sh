#!/usr/bin/env bash
# A training script with Hugging Face's Trainer, and texts whose lengths differ: does balancing pay, and how is it switched on?
# Commands: 1 estimate, 1 changed import, 1 argument that packs, and the training as before. Decisions: 3 (number of ranks, whether the
# collator pads, whether to pack). Before there was `BalancedTrainer` it took dflop's own engine: 14 decisions to a run.
set -euo pipefail
PS4='$ '
set -x
dflop sampler estimate texts.jsonl --ranks 2 --padded
torchrun --nproc-per-node 2 train.py
sed -i 's/, Trainer, TrainingArguments$/, TrainingArguments\nfrom dflop.sampler.hf import BalancedTrainer as Trainer/' train.py
torchrun --nproc-per-node 2 train.py
sed -i 's/, rows).train()$/, rows, packing="exact").train()/' train.py
torchrun --nproc-per-node 2 train.py

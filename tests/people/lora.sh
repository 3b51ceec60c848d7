#!/usr/bin/env bash
# Adapters on own data: a configuration and its media become a folder that peft reads.
# Commands: 1 to train, 1 for the validation loss, 1 for the folder. Decisions: 4 (targets, rank, how many samples to hold out, how often
# to look at them). The base stays as it is; the checkpoints hold the adapters.
set -euo pipefail
PS4='$ '
set -x
dflop run my.yaml --set 'train.lora={targets: {llm: [all-linear]}, rank: 8}' --set 'model.frozen=[vision, audio]' \
    --set validation.num_samples=8 --set validation.every_steps=4 --set validation.keep_best=true
dflop sql validation --param run_id=latest
dflop export latest --best --out adapters
ls adapters

#!/usr/bin/env bash
# GRPO with TRL on questions about images: do ranks wait for the one with the dearest rollouts, and does dealing them change the update?
# Commands: 1, the training as before. Decisions: 1 (what a rollout costs), and a subclass of TRL's trainer: 2 methods, some 70 lines with what they call.
set -euo pipefail
PS4='$ '
set -x
torchrun --nproc-per-node 2 grpo.py

#!/usr/bin/env bash
# A loop that updates a policy, and rollouts with a long tail: how is each rank given as much to do?
# Commands: 1, the training as before. Decisions: 2 (tokens of a microbatch, where ranks meet).
set -euo pipefail
PS4='$ '
set -x
torchrun --nproc-per-node 2 rollouts.py

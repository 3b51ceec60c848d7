#!/usr/bin/env bash
# A loop with FSDP2, and chats with and without images: what does dealing the images over ranks save, and do losses stay what they were?
# Commands: 1, the training as before. Decisions: 1, a `with` round the loop.
set -euo pipefail
PS4='$ '
set -x
torchrun --nproc-per-node 2 dealt_encoder.py

#!/usr/bin/env bash
# Why was last night's run slow? From the store alone, where the run was driven.
# Commands: 1 for the list of questions, 1 for each of four. Decisions: 1 (which question); run_id=latest is the run that began last.
# Before, each question needed the run's id, and no query named the samples of a slow step.
set -euo pipefail
PS4='$ '
set -x
dflop sql --list
dflop sql slowdown --param run_id=latest       # was it slow from the start?
dflop sql slow_ranks --param run_id=latest     # a machine?
dflop sql slow_hosts                           # in other runs, too?
dflop sql slowest_steps --param run_id=latest  # or samples? the longest one of each slow step

"""Somebody's policy update: rollouts of long-tailed lengths, dealt to two processes by cost."""

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from dflop.balance import deal

PROMPTS, GROUP, MAX_TOKENS = 12, 4, 2048
dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
rng = np.random.default_rng(0)
lengths = np.clip(rng.lognormal(4.5, 1.2, PROMPTS * GROUP), 8, 1500).astype(int)
rollouts = [torch.tensor(rng.integers(0, 48, n)) for n in lengths]
rewards = rng.standard_normal((PROMPTS, GROUP))
advantages = ((rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, keepdims=True)).ravel()
config = LlamaConfig(vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
torch.manual_seed(0)
policy = LlamaForCausalLM(config)


def update(microbatch):
    """Policy gradient of some rollouts, one after the other."""
    for i in microbatch:
        logits = policy(rollouts[i][None]).logits[0, :-1]
        logprob = torch.log_softmax(logits, -1).gather(1, rollouts[i][1:, None])
        (-advantages[i] * logprob.sum() / (lengths.sum() - len(lengths))).backward()


def gradient():
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


plan = deal(lengths, num_ranks, max_tokens=MAX_TOKENS, sync="microbatch")
for microbatch in plan.of_rank(rank):
    update(microbatch)
dealt = gradient()
dist.all_reduce(dealt)
policy.zero_grad()
update(range(len(lengths)))
error = float((dealt - gradient()).norm() / gradient().norm())
if rank == 0:
    tokens = [sum(lengths[positions].sum() for positions in plan.of_rank(r)) for r in range(num_ranks)]
    print(f"{plan.num_microbatches} microbatches on each of {num_ranks} ranks, tokens {tokens[0]} and {tokens[1]}")
    print(f"slowest rank over the bound: {plan.step_s / plan.lower_bound_s:.3f}; error of the gradient: {error:.1e}")
dist.destroy_process_group()

"""Somebody's training script: a tiny Llama from random weights on `texts.jsonl`, padded."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def collate(rows):
    texts = [torch.tensor(row["input_ids"]) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


torch.manual_seed(0)
rows = [json.loads(line) for line in Path("texts.jsonl").read_text().splitlines()]
config = LlamaConfig(vocab_size=48, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
arguments = TrainingArguments(
    "out", use_cpu=True, per_device_train_batch_size=8, num_train_epochs=2, learning_rate=3e-3, logging_steps=4,
    save_strategy="no", report_to=[], disable_tqdm=True, ddp_find_unused_parameters=False,
)  # fmt: skip
Trainer(LlamaForCausalLM(config), arguments, collate, rows).train()
torch.distributed.destroy_process_group()  # at exit gloo's threads may abort the process

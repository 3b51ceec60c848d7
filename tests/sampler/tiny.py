"""A tiny decoder with random weights, texts of very different lengths, and its gradient one sample at a time."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflop.sampler import SampleCosts, sample_costs

VOCAB = 48


def make_model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds of every collection

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Bare(torch.nn.Module):
    """A model whose forward takes no `num_items_in_batch`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, input_ids, attention_mask, labels):
        return {"loss": self.net(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss}


def make_dataset(num_samples: int = 40) -> list[dict[str, Tensor]]:
    """Prompts carry no loss, and their share differs from sample to sample."""
    rng = np.random.default_rng(1)
    samples = []
    for length in np.clip(rng.lognormal(2.7, 0.9, num_samples), 4, 120).astype(int):
        ids = torch.tensor(rng.integers(1, VOCAB, length))
        labels = ids.clone()
        labels[: rng.integers(0, length - 1)] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    def padded(name: str, value: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([s[name] for s in samples], batch_first=True, padding_value=value)

    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(s["input_ids"]) for s in samples], batch_first=True)
    return {"input_ids": padded("input_ids", 0), "attention_mask": mask, "labels": padded("labels", -100)}


def num_supervised(sample: dict[str, Any]) -> int:
    """Predicted tokens: the first of a sequence is not."""
    return int((sample["labels"][..., 1:] != -100).sum())


def costs_of(dataset: list[dict[str, Tensor]]) -> SampleCosts:
    lengths = [len(s["input_ids"]) for s in dataset]
    return sample_costs(lengths, cost=lambda i: lengths[i] ** 1.1, supervised=map(num_supervised, dataset))


def exact_gradient(dataset: list[dict[str, Tensor]], indices: set[int]) -> Tensor:
    """Gradient of the mean loss over all supervised tokens, one sample at a time."""
    model = make_model()
    total = sum(num_supervised(dataset[i]) for i in indices)
    for i in sorted(indices):
        loss = model(**collate([dataset[i]])).loss
        (loss * num_supervised(dataset[i]) / total).backward()
    return flat_gradient(model)


def remembering_module() -> Any:
    """A Lightning module that trains nothing, and knows in `seen` what it was given."""
    import pytorch_lightning as pl  # seconds of every collection

    class Remembering(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.seen = torch.nn.Parameter(torch.zeros(1)), []

        def training_step(self, batch, batch_idx):
            self.seen.append(batch)
            return self.weight.sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    return Remembering()


def flat_gradient(model: torch.nn.Module) -> Tensor:
    """Of all parameters in the order of their names, whatever a wrapper has put before them."""
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        found[name.replace("module.", "").replace("net.", "")] = grad.detach().clone().flatten()
    return torch.cat([found[name] for name in sorted(found)])


def error_frac(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())

"""TRL packs a step of samples with images: `python -m tests.sampler.trl_trainer FOLDER`, with TRL on the path.

Prints how far gradients are from those of one sample at a time. A process of its own, as TRL brings datasets.
"""

import sys

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from dflop.sampler.hf import BalancedTrainerMixin
from tests.balance.test_packing import collate, of_one_at_a_time
from tests.balance.tiny import make_model
from tests.sampler.test_packed_trainer import NUM_SAMPLES, Keep, samples_of

KIND = "qwen2_5_vl"


class Balanced(BalancedTrainerMixin, SFTTrainer):
    """What a user writes."""


def main() -> None:
    model, keep = make_model(KIND), Keep()
    samples = samples_of(KIND, model)
    lengths = [sample["input_ids"].shape[1] for sample in samples]
    dataset = Dataset.from_dict({"number": list(range(NUM_SAMPLES)), "length": lengths})
    vocabulary = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>")
    arguments = SFTConfig(
        sys.argv[1], use_cpu=True, bf16=False, max_steps=1, learning_rate=0.0, gradient_accumulation_steps=2,
        max_grad_norm=0.0, per_device_train_batch_size=NUM_SAMPLES // 2, report_to=[], save_strategy="no",
        disable_tqdm=True, remove_unused_columns=False, data_seed=0, gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    trainer = Balanced(
        model, arguments, lambda rows: collate([samples[row["number"]] for row in rows]), dataset,
        processing_class=tokenizer, packing="exact", callbacks=[keep],
    )  # fmt: skip
    trainer.train()
    expected = of_one_at_a_time(KIND, samples_of(KIND, make_model(KIND)))
    errors = [float((keep.found[0][name] - exact).norm() / exact.norm()) for name, exact in expected.items()]
    print(max(errors))


if __name__ == "__main__":
    main()

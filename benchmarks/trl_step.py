"""TRL's GRPOTrainer as a contender of `speed.py update`: its own training_step on the benchmark's batch, only the sampling taken out."""

import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.contenders import CLIP_HIGH, CLIP_LOW, GRAD_CLIP, GROUP, Sizes, Step, Way, parts_of
from ragen_agent.batch import Batch


def trl_step(way: Way, sizes: Sizes, model: PreTrainedModel, batch: Batch, optimizer: torch.optim.Optimizer) -> Step:
    """TRL's own training_step (prepare, compute_loss, backward) on the batch as it pads one: prompts left, completions right.

    Only the sampling is taken out. TRL's padding is that of the whole generation batch, in every micro-batch.
    """
    if len(batch) % (rows := 1 if way.rows == "one" else sizes.rows):
        raise ValueError(f"TRL's loss needs micro-batches of equal size: {len(batch)} episodes are no multiple of {rows} rows")
    trainer = _trainer(model, optimizer, rows, len(batch) // rows, sizes.threads)
    if way.again:
        model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)  # Trainer.train() does it
    inputs = trl_inputs(batch)
    parts = [{name: x[index] for name, x in inputs.items()} for index in parts_of(way, sizes, batch)]
    if way.kind == "trl-cut":
        from trl.trainer import utils

        # Its name for "score the completions alone"; the kernels read another copy.
        utils._use_triton = lambda device: True  # pyright: ignore
        parts = [_cut(part) for part in parts]

    def step() -> Tensor:
        losses = [trainer.training_step(model, part, None) for part in parts]
        trainer._metrics["train"].clear()
        return torch.stack(losses).sum()

    return step


def trl_inputs(batch: Batch) -> dict[str, Tensor]:
    """The batch under TRL's names: what stands before the first sampled token is the prompt, the rest is the completion."""
    first = batch.sampled.long().argmax(1)
    length = batch.real.sum(1)
    before, after = int(first.max()), int((length - first).max())
    index = torch.arange(len(batch))[:, None]
    assert batch.old is not None and batch.advantage is not None
    left = torch.arange(before) + (first[:, None] - before)  # (B, before) columns of the batch, negative on padding
    right = torch.arange(after) + first[:, None]
    kept = right < length[:, None]
    right = right.clamp(max=batch.ids.shape[1] - 1)
    return {
        "prompt_ids": torch.where(left >= 0, batch.ids[index, left.clamp(min=0)], 0),
        "prompt_mask": (left >= 0).long(),
        "completion_ids": torch.where(kept, batch.ids[index, right], 0),
        "completion_mask": kept.long(),
        "tool_mask": (batch.sampled[index, right] & kept).long(),  # 0 on what the world said
        "advantages": batch.advantage.gather(1, first[:, None])[:, 0],  # (B,)
        "old_per_token_logps": torch.where(kept, batch.old[index, right], 0.0),
    }


def _cut(part: dict[str, Tensor]) -> dict[str, Tensor]:
    """TRL's inputs without the columns that are padding in all of its rows."""
    before, after = int(part["prompt_mask"].sum(1).max()), int(part["completion_mask"].sum(1).max())
    cut = {name: x[:, -before:] if name.startswith("prompt") else x if x.dim() == 1 else x[:, :after] for name, x in part.items()}
    return {name: x.contiguous() for name, x in cut.items()}


def _trainer(model: PreTrainedModel, optimizer: torch.optim.Optimizer, rows: int, steps: int, threads: int) -> Any:
    """A GRPOTrainer about to make an update: beta 0, its "grpo" loss (the mean of the episodes' means), fp32."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    raw = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=steps,
        num_generations=GROUP,
        beta=0.0,
        epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        loss_type="grpo",
        max_grad_norm=GRAD_CLIP,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * GROUP}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<end>"),
        optimizers=(optimizer, None),  # pyright: ignore
    )
    torch.set_num_threads(threads)
    trainer.current_gradient_accumulation_steps = steps
    trainer._prepare_inputs = lambda inputs: inputs  # would sample
    return trainer

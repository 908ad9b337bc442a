"""What teaching and training share: micro-batches by tokens, the optimizer and its schedule."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ragen_agent.batch import Batch


def micro_batches(batch: Batch, tokens: int) -> list[Tensor]:
    """Row indices of micro-batches of like lengths, each at most `tokens` tokens with its padding (or one row)."""
    lengths = batch.real.sum(1)
    parts: list[list[int]] = [[]]
    for row in torch.argsort(lengths, stable=True).tolist():
        if parts[-1] and int(lengths[row]) * (len(parts[-1]) + 1) > tokens:
            parts.append([])
        parts[-1].append(row)
    return [torch.tensor(part) for part in parts if part]


def optimizer_of(parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW (betas .9 and .999) that decays matrices and leaves vectors alone."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=(0.9, 0.999))


def schedule(optimizer: torch.optim.Optimizer, updates: int, warm: float = 0.05, last: float = 0.1) -> torch.optim.lr_scheduler.LambdaLR:
    """A linear rise over the share `warm` of the updates, then a linear fall to the share `last` of the highest rate."""
    rise = max(1, round(updates * warm))

    def rate(step: int) -> float:
        return min((step + 1) / rise, max(last, 1 - (1 - last) * (step - rise) / max(1, updates - rise)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

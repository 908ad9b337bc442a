"""What teaching and training share: micro-batches by tokens, the optimizer, its fp32 master weights and its schedule."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ragen_agent.batch import Batch


def micro_batches(batch: Batch, tokens: int, whole: bool = False) -> list[Tensor]:
    """Row indices of micro-batches of like lengths, each at most `tokens` tokens with its padding (or one row).

    With `whole` the rows of an episode stay together, and a micro-batch may be one episode that is larger than that.
    """
    lengths = batch.real.sum(1).tolist()
    units: dict[int, list[int]] = {}
    for row, episode in enumerate(batch.episode.tolist() if whole else range(len(lengths))):
        units.setdefault(episode, []).append(row)
    parts: list[list[int]] = [[]]
    for unit in sorted(units.values(), key=lambda rows: max(lengths[row] for row in rows)):
        if parts[-1] and max(lengths[row] for row in unit) * (len(parts[-1]) + len(unit)) > tokens:
            parts.append([])
        parts[-1] += unit
    return [torch.tensor(part) for part in parts if part]


def optimizer_of(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    lr: float,
    weight_decay: float,
    kind: str = "adamw",
    masters: bool = True,
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101; betas .9 and .999) that decays matrices and leaves vectors alone; parameters that do not train are left out.

    `parameters` may be groups with a rate of their own: `[{"params": policy.parameters()}, {"params": critic.parameters(), "lr": 1e-4}]`.
    `kind` is a key of `OPTIMIZERS`: adamw8bit keeps its two moments in 8 bits (arXiv 2110.02861). With `masters`, parameters below fp32
    train through fp32 copies (see `MasterWeights`). Raises `ValueError` for another kind, and where its package is missing.
    """
    if kind not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {kind!r}; known: {', '.join(OPTIMIZERS)}")
    given: list[Any] = list(parameters)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    told = [part for group in groups for part in _halves({"lr": lr, "weight_decay": weight_decay, **group}) if part["params"]]
    if not told:
        raise ValueError("no parameter trains: there is nothing to optimize")
    made = OPTIMIZERS[kind](told)
    low = any(p.dtype in (torch.bfloat16, torch.float16) for group in told for p in group["params"])
    return MasterWeights(made) if masters and low else made


def _halves(group: dict[str, Any]) -> list[dict[str, Any]]:
    """What trains of a group: its matrices, and its vectors without decay."""
    trained = [p for p in group["params"] if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    return [{**group, "params": matrices}, {**group, "params": vectors, "weight_decay": 0.0}]


def _adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=(0.9, 0.999))


def _adamw8bit(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    try:
        from bitsandbytes.optim.adamw import AdamW8bit
    except ImportError as error:
        raise ValueError('the optimizer adamw8bit needs the package bitsandbytes: pip install "ragen-gym[optim8]"') from error
    return AdamW8bit(groups, betas=(0.9, 0.999))


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {"adamw": _adamw, "adamw8bit": _adamw8bit}


class MasterWeights(torch.optim.Optimizer):
    """An optimizer whose parameters below fp32 have fp32 copies that it steps instead (mixed precision, arXiv 1710.03740).

    bf16 keeps 8 bits: at weight 1 a change under 1/512 to 1/256 is rounded away, and a small learning rate trains nothing. Here it
    adds up in the copy, and the parameter is the copy rounded. Gradients are clipped and cleared on the model's own parameters, as
    ever. Parameters in fp32 are stepped as they are. The state holds the copies, so that a resumed run goes on bit for bit.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        """Take over `inner`, made of the model's parameters and not stepped yet (else ValueError)."""
        if inner.state:
            raise ValueError("master weights are taken before the first step: this optimizer has a state already")
        self.inner = inner
        self.pairs: list[tuple[Tensor, Tensor]] = []  # (the model's parameter, its fp32 copy)
        for group in inner.param_groups:
            group["params"] = [self._copied(parameter) for parameter in group["params"]]
        super().__init__(inner.param_groups, inner.defaults)
        self._share()

    def _copied(self, parameter: Tensor) -> Tensor:
        if parameter.dtype not in (torch.bfloat16, torch.float16):
            return parameter
        copy = nn.Parameter(parameter.detach().float())
        self.pairs.append((parameter, copy))
        return copy

    def _share(self) -> None:
        """Groups (rates that a schedule sets) and state are the inner optimizer's."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore
        """One step of the inner optimizer on the copies, by the model's gradients; the model gets the result, rounded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, copy in self.pairs:
            copy.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        for parameter, copy in self.pairs:
            copy.grad = None
            parameter.copy_(copy)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's parameters."""
        self.inner.zero_grad(set_to_none)
        for parameter, _ in self.pairs:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def state_dict(self) -> dict[str, Any]:
        """{"inner": the inner optimizer's, "masters": the fp32 copies in the order of the groups}."""
        return {"inner": self.inner.state_dict(), "masters": [copy.detach() for _, copy in self.pairs]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state; the model's parameters become its copies, rounded. ValueError where it is of another model."""
        masters = state_dict["masters"]
        if [m.shape for m in masters] != [copy.shape for _, copy in self.pairs]:
            raise ValueError("these master weights are of another model: numbers or shapes differ")
        self.inner.load_state_dict(state_dict["inner"])
        self._share()
        for (parameter, copy), master in zip(self.pairs, masters, strict=True):
            copy.copy_(master)
            parameter.copy_(copy)


def trained_state(module: nn.Module) -> dict[str, Tensor]:
    """The state of `module` without the parameters that do not train: of a policy with adapters, a checkpoint of theirs alone."""
    frozen = {name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    return {name: value for name, value in module.state_dict().items() if name not in frozen}


def load_trained_state(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Take up what `trained_state` gave of a module whose frozen parameters are the same. ValueError where names differ."""
    if differ := sorted(trained_state(module).keys() ^ state.keys()):
        raise ValueError(f"this state is of other parameters: {', '.join(differ[:4])}")
    module.load_state_dict(state, strict=False)


def schedule(optimizer: torch.optim.Optimizer, updates: int, warm: float = 0.05, last: float = 0.1) -> torch.optim.lr_scheduler.LambdaLR:
    """A linear rise over the share `warm` of the updates, then a linear fall to the share `last` of the highest rate."""
    rise = max(1, round(updates * warm))

    def rate(step: int) -> float:
        return min((step + 1) / rise, max(last, 1 - (1 - last) * (step - rise) / max(1, updates - rise)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

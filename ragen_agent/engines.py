"""How weights, gradients and optimizer states are held: whole in every process, or sharded over them by FSDP2 (by DeepSpeed: `zero`)."""

import os
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from ragen_agent import parallel
from ragen_agent.algos import StarPO, Totals
from ragen_agent.batch import Batch
from ragen_agent.model import split
from ragen_agent.updates import MasterWeights, load_trained_state, trained_state

Build = Callable[[StarPO], torch.optim.Optimizer]


def engine_of(algo: StarPO, build: Build) -> "Engine":
    """The engine that the launcher asked for: FSDP2 or ZeRO under `accelerate launch` with such a config, else whole copies.

    `build` makes torch's optimizer, of the weights as the engine holds them. `ValueError` for a DeepSpeed config that `Zero` does not
    know, or without the package deepspeed.
    """
    wanted = {name: os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true" for name in ("FSDP", "DEEPSPEED")}
    if wanted["DEEPSPEED"]:
        from ragen_agent.zero import Zero, asked

        asked()  # in a single process too, which has nothing to shard over
        return Zero(algo, build) if parallel.size() > 1 else Engine(algo, build)
    return Sharded(algo, build) if wanted["FSDP"] and parallel.size() > 1 else Engine(algo, build)


class Engine:
    """An optimizer of ours with torch's optimizer of its weights: in one process, or in several that each hold all weights.

    Gradients are averaged once a step, after the last micro-batch, by hand: a process may make as many passes as it has rows for.
    """

    lockstep = False  # whether every process must make the same passes at the same time

    def __init__(self, algo: StarPO, build: Build):
        """Take the weights of the main process everywhere."""
        parallel.agree(algo)
        self.algo, self.optimizer = algo, build(algo)

    @property
    def whole(self) -> StarPO:
        """The optimizer with all of its weights, as they are now: it samples, looks back, and is saved. Not for training."""
        return self.algo

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.algo.parameters()).device

    def prepare(self, batch: Batch, micro_rows: int, scale: float) -> dict[str, float]:
        """`StarPO.prepare`; every process must call it."""
        return self.whole.prepare(batch, micro_rows, scale)

    def totals(self, batch: Batch, micro_rows: int) -> Totals:
        """`StarPO.totals`; every process must call it."""
        return self.whole.totals(batch, micro_rows)

    def gradients(self, batch: Batch, cuts: Sequence[Tensor], totals: Totals) -> list[dict[str, Tensor]]:
        """Add up the gradients of the micro-batches whose rows `cuts` name; their metrics."""
        told = []
        for index in cuts:
            loss, metrics = self.algo(batch.rows(index), totals)
            loss.backward()
            told.append(metrics)
        return told

    def cut(self, limit: float) -> dict[str, float]:
        """Average the gradients over the processes, cut the norm of each part's to `limit`, and return what they were.

        Parts (`StarPO.trained`) are cut apart: a critic's gradient, which has the scale of the returns, must not shrink the policy's.
        """
        if parallel.size() > 1:
            parallel.average([p for p in self.algo.parameters() if p.requires_grad])
        return {name: float(nn.utils.clip_grad_norm_(part, limit)) for name, part in self.algo.trained().items()}

    def zero(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Move the weights."""
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """{"algo", "optimizer"}, of what trains: the same in every engine and for any number of processes; every process must call it."""
        return {"algo": trained_state(self.whole), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave, in whatever engine; every process must call it."""
        load_trained_state(self.algo, state["algo"])
        self.optimizer.load_state_dict(state["optimizer"])


class Sharded(Engine):
    """FSDP2: each process trains a shard of every weight, and keeps one whole copy beside it to sample, look back and save from.

    Gradients and optimizer states are divided by the number of processes. Layers are gathered as they are passed through, so all
    processes must make as many passes: one with fewer micro-batches makes blank ones, whose loss counts 0.
    """

    lockstep = True

    def __init__(self, algo: StarPO, build: Build):
        """Shard `algo` in place, layer by layer."""
        parallel.agree(algo)
        split(algo.policy)  # its check reads the policy on its own, which a sharded one does not allow
        known = {id(algo._reference): algo._reference}  # frozen: one is enough
        self.algo, self._copy, self._fresh = algo, deepcopy(algo, known), True
        mesh = init_device_mesh(self.device.type, (parallel.size(),))
        layers = set(algo.policy._no_split_modules or ())  # pyright: ignore  (Hugging Face's own list)
        for module in [m for m in algo.modules() if type(m).__name__ in layers]:
            fully_shard(module, mesh=mesh)
        for child in algo.children():
            if child is not algo.policy:  # a critic, whose weights may be of another type than the policy's
                fully_shard(child, mesh=mesh)
        fully_shard(algo, mesh=mesh)  # the rest of the policy: `score` does not call its forward
        self.optimizer = build(algo)

    @property
    def whole(self) -> StarPO:
        """A copy with all weights, gathered anew where they have moved; every process must ask."""
        if not self._fresh:
            for name, weight in self._copy.named_parameters():
                if weight.requires_grad:
                    weight.data.copy_(parallel.gathered(self.algo.get_parameter(name)).detach())
            self._fresh = True
        return self._copy

    def prepare(self, batch: Batch, micro_rows: int, scale: float) -> dict[str, float]:
        """`StarPO.prepare` by the whole copy; what it writes beside the batch, an adaptive coefficient, is the trained one's too."""
        looked = super().prepare(batch, micro_rows, scale)
        for name, value in self._copy.named_buffers():
            self.algo.get_buffer(name).copy_(value)
        return looked

    def totals(self, batch: Batch, micro_rows: int) -> Totals:
        """`StarPO.totals`; the weights are gathered only where the policy is read for them."""
        return Totals.of(batch) if self.algo.ratio == "token" else super().totals(batch, micro_rows)

    def gradients(self, batch: Batch, cuts: Sequence[Tensor], totals: Totals) -> list[dict[str, Tensor]]:
        """As in `Engine`, then blank passes up to as many as the busiest process makes."""
        most = max(parallel.union([len(cuts)]))  # asked before the first pass, in which others would wait
        told = super().gradients(batch, cuts, totals)
        for _ in range(most - len(cuts)):
            blank, its = nothing(batch, totals)
            loss, _ = self.algo(blank, its)
            (0 * loss).backward()
        return told

    def cut(self, limit: float) -> dict[str, float]:
        """The gradients are averaged already; the norms are of all shards."""
        parts = self.algo.trained()
        return {name: float(parallel.gathered(nn.utils.clip_grad_norm_(part, limit))) for name, part in parts.items()}

    def step(self) -> None:
        """Move the shards."""
        self.optimizer.step()
        self._fresh = False

    def state(self) -> dict[str, Any]:
        """As in `Engine`; the tensors are whole, and in the main process only."""
        return {"algo": trained_state(self.whole), "optimizer": tree_map(_kept_by_main, self.optimizer.state_dict())}

    def load(self, state: dict[str, Any]) -> None:
        """As in `Engine`; each process takes its shards of whole tensors."""
        load_trained_state(self._copy, state["algo"])
        self._fresh = True
        with torch.no_grad():
            for name, weight in self._copy.named_parameters():
                own = self.algo.get_parameter(name)
                own.copy_(parallel.shard(weight, own))
            for name, value in self._copy.named_buffers():
                self.algo.get_buffer(name).copy_(value)
        self.optimizer.load_state_dict(_sharded(state["optimizer"], self.optimizer))


def nothing(batch: Batch, totals: Totals) -> tuple[Batch, Totals]:
    """One row of two tokens, the second of which passes for sampled, and the totals of a step that it could be part of."""
    blank = copy(batch)
    for name, value in vars(batch).items():
        if value is not None:
            setattr(blank, name, value.new_zeros((1, 2) if value.dim() == 2 else 1))
    blank.real, blank.sampled = torch.ones_like(blank.real), torch.tensor([[False, True]], device=blank.ids.device)
    its = replace(totals, length=totals.length.new_ones(1), log_ratio=None if totals.log_ratio is None else totals.log_ratio.new_zeros(1))
    return blank, its


def _kept_by_main(x: Any) -> Any:
    if not isinstance(x, DTensor):
        return x
    whole = x.full_tensor()
    return whole.cpu() if parallel.main() else None


def _sharded(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state of whole tensors, as `optimizer` holds it: what has a weight's shape is laid out as the weight."""
    if isinstance(optimizer, MasterWeights):
        masters = [parallel.shard(whole, copy) for whole, (_, copy) in zip(state["masters"], optimizer.pairs, strict=True)]
        return {"inner": _sharded(state["inner"], optimizer.inner), "masters": masters}
    weights = [p for group in optimizer.param_groups for p in group["params"]]

    def placed(own: dict[str, Any], weight: Tensor) -> dict[str, Any]:
        return {name: parallel.shard(value, weight) if isinstance(value, Tensor) else value for name, value in own.items()}

    return {**state, "state": {i: placed(own, weights[i]) for i, own in state["state"].items()}}

"""ZeRO by DeepSpeed: weights are whole in every process, fp32 weights and moments in shards. Imported where a launcher asks for it."""

import os
from collections.abc import Iterator
from itertools import count
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ragen_agent import parallel
from ragen_agent.algos.starpo import StarPO, summed
from ragen_agent.engines import Build, Engine
from ragen_agent.updates import MasterWeights, load_trained_state, trained_state

STAGES = (1, 2)
SIZES = ("reduce_bucket_size", "allgather_bucket_size")  # what is taken of a DeepSpeed config besides the stage
TYPES = (torch.float32, torch.bfloat16)
MISSING = 'a DeepSpeed config needs the package deepspeed: pip install "ragen-gym[deepspeed]"'
SHARED_MEMORY = "deepspeed_shm_comm"  # an extension of DeepSpeed, for inference by CPUs, that it would compile at every first start


def asked() -> dict[str, Any]:
    """What accelerate's launcher was told of ZeRO: the stage and the sizes of buckets. `ValueError` where that is not known here."""
    from accelerate.utils import DeepSpeedPlugin  # which reads the launcher's variables

    told = DeepSpeedPlugin().deepspeed_config["zero_optimization"]
    if told["stage"] not in STAGES:
        known = " and ".join(map(str, STAGES))
        raise ValueError(f"no engine for ZeRO stage {told['stage']}; known: {known}. fsdp2.yaml shards the weights too, as stage 3 does")
    for part in ("offload_optimizer", "offload_param"):
        if (device := told.get(part, {}).get("device", "none")) != "none":
            raise ValueError(f"{part} to {device}: there is no offloading under ZeRO; shards stay where the weights are")
    given = {name for name, value in told.items() if value != "auto" and not name.startswith(("stage", "offload_"))}
    if unknown := sorted(given - set(SIZES)):
        raise ValueError(f"unknown settings of ZeRO: {', '.join(unknown)}; known: stage, {', '.join(SIZES)}")
    return {"stage": told["stage"], **dict.fromkeys(SIZES, parallel.BUCKET), **{name: told[name] for name in given}}


class Zero(Engine):
    """DeepSpeed's ZeRO optimizer, stage 1 or 2 (arXiv 1910.02054), around torch's.

    DeepSpeed trains twins of the weights, which share their memory but are in no graph: its hooks, which reduce in the middle of a
    backward pass, do not run. Gradients add up on the weights themselves, as in `Engine`, and are handed to the twins once a step: each
    process gets the average of its shard, cuts it and moves the shard; then the weights are gathered.
    """

    def __init__(self, algo: StarPO, build: Build):
        """Take the weights of the main process everywhere, and give DeepSpeed those that train."""
        self.algo = algo
        zero, deepspeed = asked(), needed(self.device)
        parallel.agree(algo)
        inner = plain(build(algo))
        trained = [p for group in inner.param_groups for p in group["params"]]
        self.low = one_type(trained) == torch.bfloat16
        twins = {p: nn.Parameter(p.detach()) for p in trained}
        owner = {p: name for name, part in algo.trained().items() for p in part}
        self._parts = [owner[group["params"][0]] for group in inner.param_groups]
        for group in inner.param_groups:
            group["params"] = [twins[p] for p in group["params"]]
        config = {
            "train_micro_batch_size_per_gpu": 1,  # of DeepSpeed's own loader, which is not used
            "zero_optimization": {**zero, "compute_grad_norm": False},
            "gradient_clipping": 0.0,  # `cut` has cut already
            "bf16": {"enabled": self.low},
        }
        self._pairs = list(twins.items())
        held = nn.ParameterList(twins.values())
        self._engine, self.optimizer, *_ = deepspeed.initialize(model=held, optimizer=inner, config=config, dist_init_required=False)
        for weight, twin in self._pairs:
            weight.data = twin.data  # DeepSpeed has laid them out anew

    def cut(self, limit: float) -> dict[str, float]:
        """As in `Engine`; each process keeps the average of its shards only."""
        with self._engine.coalesce_grad_reduction():  # reduced as it is left
            for weight, twin in self._pairs:
                twin.grad, weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad, None
        norms = {}
        for name in dict.fromkeys(self._parts):
            shards = [x for i, held in self.optimizer.averaged_gradients.items() if self._parts[i] == name for x in held]
            norms[name] = float(summed(torch.stack([x.double().square().sum() for x in shards]).sum()).sqrt())
            for x in shards:
                x.mul_(min(1.0, limit / (norms[name] + 1e-6)))
        return norms

    def zero(self) -> None:
        """Forget the gradients: those of the weights and the averages in shards."""
        for weight, twin in self._pairs:
            weight.grad = twin.grad = None
        self.optimizer.averaged_gradients.clear()

    def step(self) -> None:
        """Move the shards and gather the weights."""
        self._engine.step()

    def state(self) -> dict[str, Any]:
        """As in `Engine`; the optimizer's tensors are whole, and in the main process only."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        groups, states, masters = [], {}, []
        for group, shard, twins in self._held():
            own = self._linked(shard, twins)
            groups.append({**group, "params": list(twins)})
            for i, twin in twins.items():
                masters += [_kept_by_main(safe_get_full_fp32_param(twin))] if self.low else []
                if own:
                    states[i] = {
                        name: _kept_by_main(safe_get_full_optimizer_state(twin, name)) if _sharded(value, shard) else _copied(value)
                        for name, value in own.items()
                    }
        inner = {"state": states, "param_groups": groups}
        return {"algo": trained_state(self.algo), "optimizer": {"inner": inner, "masters": masters} if self.low else inner}

    def load(self, state: dict[str, Any]) -> None:
        """As in `Engine`; each process takes its shards of whole tensors."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        load_trained_state(self.algo, state["algo"])
        inner = state["optimizer"]["inner"] if self.low else state["optimizer"]
        for (group, shard, twins), told in zip(self._held(), inner["param_groups"], strict=True):
            group.update({name: value for name, value in told.items() if name != "params"})
            states = {i: inner["state"][i] for i in twins if i in inner["state"]}
            moments = {name for i, own in states.items() for name, value in own.items() if name != "step" and isinstance(value, Tensor)}
            first = next(iter(states.values()), {})
            self.optimizer.state[shard] = {n: torch.zeros_like(shard) if n in moments else _copied(x) for n, x in first.items()}
            self._linked(shard, twins)
            for i, twin in twins.items():
                safe_set_full_fp32_param(twin, state["optimizer"]["masters"][i] if self.low else twin.detach())
                for name in moments & states.get(i, {}).keys():
                    safe_set_full_optimizer_state(twin, states[i][name], name)

    def _held(self) -> Iterator[tuple[dict[str, Any], Tensor, dict[int, nn.Parameter]]]:
        """Each group of torch's optimizer, this process's shard of it, and its weights by their number in a state."""
        numbers = count()
        for group, twins in zip(self.optimizer.param_groups, self.optimizer.bit16_groups, strict=True):
            yield group, group["params"][0], {next(numbers): twin for twin in twins}

    def _linked(self, shard: Tensor, twins: dict[int, nn.Parameter]) -> dict[str, Any]:
        """What torch's optimizer keeps of a shard, after telling the twins where their parts of it are."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        own = self.optimizer.state.get(shard, {})
        lazy_init_hp_params_optimizer_state(list(twins.values()), shard, {shard: own})
        return own


def needed(device: torch.device) -> ModuleType:
    """The package deepspeed, told where the weights are. `ValueError` where it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # it would guess
    try:
        import deepspeed
    except ImportError as error:
        raise ValueError(MISSING) from error
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False
    return deepspeed


def plain(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Torch's optimizer of the weights themselves: fp32 copies are DeepSpeed's part.

    `ValueError` for one that does not treat each number on its own: a shard begins and ends in the middle of a weight.
    """
    if isinstance(optimizer, MasterWeights):
        weights = {copy: weight for weight, copy in optimizer.pairs}
        optimizer = optimizer.inner
        for group in optimizer.param_groups:
            group["params"] = [weights.get(p, p) for p in group["params"]]
    if not isinstance(optimizer, torch.optim.AdamW):
        raise ValueError(f"no ZeRO for the optimizer {type(optimizer).__name__}; known: AdamW. ddp.yaml takes any")
    return optimizer


def one_type(weights: list[nn.Parameter]) -> torch.dtype:
    """The type of all `weights`, which ZeRO puts behind each other. `ValueError` where they have several, or one that is not known."""
    kinds = {p.dtype for p in weights}
    if len(kinds) > 1 or not kinds <= set(TYPES):
        names = ", ".join(sorted(map(str, kinds)))
        raise ValueError(f"ZeRO trains weights of one type, {' or '.join(map(str, TYPES))}, not {names}: fsdp2.yaml and ddp.yaml do")
    return kinds.pop()


def _sharded(value: Any, shard: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == shard.shape


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value  # a step that weights shared would be counted once for each


def _kept_by_main(whole: Tensor | None) -> Tensor | None:
    return whole.cpu() if whole is not None and parallel.main() else None

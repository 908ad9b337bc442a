"""One contender of `speed.py update` in its own process: `python -m benchmarks.measure WAY FOLDER`, a JSON line for each line on stdin."""

import ctypes
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.contenders import GRAD_CLIP, KINDS, WAYS, Sizes, batch_of, look, model_of
from ragen_agent.algos import GRPO
from ragen_agent.batch import Batch
from ragen_agent.updates import optimizer_of

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
SIZES, OLD = "sizes.json", "old.pt"  # files of FOLDER


def resident() -> tuple[int, int]:
    """(now, highest so far) resident bytes of this process."""
    if not STATUS.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return peak, peak
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024, int(lines["VmHWM"].split()[0]) * 1024


def forget_peak() -> bool:
    """Give freed memory back to the system and let the highest resident size be that of now; False where the system does not allow it."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
            CLEAR.write_text("5")
            return True
        except (OSError, AttributeError):  # not permitted, or a C library other than glibc
            return False
    return False


def prepared(sizes: Sizes, folder: Path) -> Batch:
    """The batch as `StarPO.prepare` leaves it, with the shared `old` of `folder`."""
    batch = batch_of(sizes)
    batch.old = torch.load(folder / OLD)
    batch.advantage = torch.where(batch.sampled, GRPO(nn.Module()).advantage(batch), 0.0)
    return batch


def ready_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW whose state is there already: a step with zero gradients changes no weight, and the state belongs to the resting size."""
    optimizer = optimizer_of(model.parameters(), lr, 0.0)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def updates(name: str, sizes: Sizes, folder: Path) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """What is known at rest, and a function that makes one update and tells its loss, gradient norm, seconds and memory (bytes)."""
    torch.set_num_threads(sizes.threads)
    way, model = WAYS[name], model_of(sizes)
    optimizer = ready_optimizer(model, sizes.lr)
    step = KINDS[way.kind](way, sizes, model, prepared(sizes, folder), optimizer)
    torch.set_num_threads(sizes.threads)  # again: a library may have changed it
    exact = forget_peak()
    rest = resident()[0]

    def update() -> dict[str, Any]:
        start, used = time.perf_counter(), time.process_time()
        loss = step()
        norm = nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        took = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - used}
        return {"loss": float(loss), "grad_norm": float(norm), **took, "peak": resident()[1]}

    return {"rest": rest, "peak_was_reset": exact}, update


def describe(sizes: Sizes) -> dict[str, int]:
    """How large the model and the batch are."""
    model, batch = model_of(sizes), batch_of(sizes)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "head_parameters": model.get_output_embeddings().weight.numel(),  # pyright: ignore
        "tokens": int(batch.real.sum()),
        "padded_tokens": batch.real.numel(),
        "sampled_tokens": batch.tokens,
    }


def main() -> None:
    """Prepare (WAY is "look": write what is shared, and end), then one update for each line that comes in."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    sizes = Sizes(**json.loads((folder / SIZES).read_text()))
    torch.set_num_threads(sizes.threads)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    if name == "look":
        torch.save(look(sizes), folder / OLD)
        return answer(describe(sizes))
    rest, update = updates(name, sizes, folder)
    answer(rest)
    for _ in sys.stdin:
        answer(update())


if __name__ == "__main__":
    main()

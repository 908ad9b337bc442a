"""What each step of training sends between processes: formulas, and docs/scaling.md's table by `python benchmarks/traffic.py`."""

from dataclasses import dataclass

GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Model:
    """A dense decoder, as far as traffic depends on it."""

    name: str
    parameters: float
    hidden: int
    layers: int

    def bytes(self, width: int = 2) -> float:
        """Of all weights, `width` bytes each."""
        return self.parameters * width


MODELS = (
    Model("0.5B", 0.494e9, 896, 24),  # Qwen2.5-0.5B
    Model("7B", 7.616e9, 3584, 28),  # Qwen2.5-7B
    Model("70B", 70.554e9, 8192, 80),  # Llama-3.1-70B
)


def ring(size: float, n: int) -> float:
    """Bytes each of `n` processes sends to gather or to reduce-scatter `size` bytes over a ring: (n - 1) / n of them."""
    return (n - 1) / n * size


def whole(model: Model, n: int, width: int = 2) -> float:
    """Bytes each process sends in an optimizer step when all hold all weights: one all-reduce, 2 (n - 1) / n of the gradient."""
    return 2 * ring(model.bytes(width), n)


def sharded(model: Model, n: int, passes: int = 1, width: int = 2) -> float:
    """Bytes each process sends in an optimizer step under FSDP2: a pass gathers the weights twice and reduces the gradient."""
    return passes * 3 * ring(model.bytes(width), n)


def refresh(model: Model, n: int, width: int = 2) -> float:
    """Bytes each process sends, once a round, so that all have whole weights to sample from: one gather."""
    return ring(model.bytes(width), n)


def tensor_parallel(model: Model, n: int, tokens: int, width: int = 2) -> float:
    """Bytes each of `n` GPUs of one sampler sends for `tokens` tokens read or sampled: two all-reduces of a hidden state a layer."""
    return tokens * model.layers * 2 * 2 * ring(model.hidden * width, n)


def training_memory(model: Model, n: int, width: int = 2) -> tuple[float, float]:
    """Bytes a process holds, (whole, FSDP2 with a whole copy): weight and gradient at `width`, fp32 master and two moments."""
    state = model.parameters * (2 * width + 12)
    return state, state / n + model.bytes(width)


def trajectories(episodes: int, turns: int, context: int, reply: int) -> float:
    """Bytes of a round's pickled episodes: 3 a prompt id (anew each turn), 3 + 9 a sampled id and its logprob, 8 KiB a turn of text."""
    prompts = sum(3 * (context + k * (context + reply)) for k in range(turns))
    return episodes * (prompts + turns * (12 * reply + 8192))


def seconds(size: float, gigabytes: float) -> float:
    """How long `size` bytes take at `gigabytes` (1e9 bytes) a second."""
    return size / (gigabytes * 1e9)


def table(n: int = 8, steps: int = 4, passes: int = 4) -> list[list[str]]:
    """A row a model: traffic of a round of `steps` optimizer steps of `passes` micro-batches each, by `n` processes; memory of each."""
    rows = []
    for model in MODELS:
        memory = training_memory(model, n)
        sent = [steps * whole(model, n), steps * sharded(model, n, passes), refresh(model, n), tensor_parallel(model, n, 1_000_000)]
        rows.append([model.name, *(f"{x / GIB:,.1f}" for x in (model.bytes(), *sent, *memory))])
    return rows


HEADS = ("model", "bf16 weights", "all-reduce", "FSDP2", "weights to the sampler", "TP, 1M tokens", "memory whole", "memory FSDP2")

if __name__ == "__main__":
    print("\n".join(f"| {' | '.join(row)} |" for row in [HEADS, ["---"] * len(HEADS), *table()]))
    for link, speed in (("NVLink 450 GB/s", 450), ("400 Gb/s network", 50), ("100 Gb/s network", 12.5)):
        for model in MODELS:
            sent = (4 * whole(model, 8), 4 * sharded(model, 8, 4), refresh(model, 8))
            print(link, model.name, " / ".join(f"{seconds(size, speed):.2f} s" for size in sent))
    print(f"{trajectories(256, 5, 400, 100) / MIB:.0f} MiB: 256 episodes of five turns")

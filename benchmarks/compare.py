"""From the contenders' raw numbers to ratios: what is compared with what, whether they computed the same, and the table."""

from collections.abc import Sequence
from itertools import chain
from math import isfinite
from statistics import median
from typing import Any

MIB = 1 << 20
LOSS_TOLERANCE = 1e-5  # absolute, of every update's loss
NORM_TOLERANCE = 1e-4  # relative, of the first update's gradient norm; later ones jump where a token crosses the clip bound
PLAIN, TRL = ("plain", "plain-rows", "plain-lean"), ("trl", "trl-fast", "trl-lean")
COMPARISONS = {  # what is compared -> (ours, the plain rows, the TRL rows): of several the best one, chosen anew for memory and for speed
    "equal rows at once, no gradient checkpointing": ("ours-rows", ("plain-rows",), ("trl-fast",)),
    "one row at a time, gradient checkpointing": ("ours-lean", ("plain-lean",), ("trl-lean",)),
    "each by its defaults": ("ours", ("plain",), ("trl",)),
    "against the best row of each": ("ours", PLAIN, TRL),
    "against TRL without its padding and prompts": ("ours", (), ("trl-cut",)),
}


def summary(row: dict[str, Any], tokens: int) -> dict[str, Any]:
    """One contender's numbers: memory of all its updates, time of those after the first."""
    timed = [u["seconds"] for u in row["updates"][1:]]
    peak = max(u["peak"] for u in row["updates"])
    return {
        "rest_mib": row["rest"] / MIB,  # model, optimizer state, libraries
        "peak_mib": peak / MIB,
        "extra_mib": (peak - row["rest"]) / MIB,  # what the update adds: gradients and activations
        "peak_was_reset": row["peak_was_reset"],
        "seconds": timed,
        "cpu_seconds": [u["cpu_seconds"] for u in row["updates"][1:]],
        "tokens_per_s": tokens / median(timed),
        "tokens_per_s_range": [tokens / max(timed), tokens / min(timed)],
        "loss": [u["loss"] for u in row["updates"]],
        "grad_norm": [u["grad_norm"] for u in row["updates"]],
    }


def agreement(updates: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """How far apart the contenders' losses (every update) and gradient norms (the first) are, and whether that is rounding."""
    losses = [[u["loss"] for u in row] for row in updates.values()]
    norms = [row[0]["grad_norm"] for row in updates.values()]
    loss_gap = max(max(column) - min(column) for column in zip(*losses, strict=True))
    norm_gap = (max(norms) - min(norms)) / max(norms)
    finite = all(map(isfinite, [*chain(*losses), *norms]))  # max and min pass a NaN over
    agree = finite and loss_gap <= LOSS_TOLERANCE and norm_gap <= NORM_TOLERANCE
    return {"loss_gap": loss_gap, "norm_gap": norm_gap, "loss_tolerance": LOSS_TOLERANCE, "norm_tolerance": NORM_TOLERANCE, "agree": agree}


def ratios(rows: dict[str, dict[str, Any]], gradients: float) -> dict[str, Any]:
    """For every comparison whose rows are there: ours over theirs, memory (smaller is better) and tokens/s (larger is better)."""
    found = {}
    for name, (ours, *others) in COMPARISONS.items():
        sides = {label: [w for w in names if w in rows] for label, names in zip(("plain", "trl"), others, strict=True)}
        sides = {label: names for label, names in sides.items() if names}
        if ours not in rows or not sides:
            continue
        found[name] = {label: ratio(rows, ours, names, gradients) for label, names in sides.items()}
        if len(sides) > 1:
            found[name]["better"] = ratio(rows, ours, [w for names in sides.values() for w in names], gradients)
    return found


def ratio(rows: dict[str, dict[str, Any]], ours: str, theirs: Sequence[str], gradients: float) -> dict[str, Any]:
    """Ours over the leanest and over the fastest of `theirs`; the range of the speeds is over the rounds, in which both ran.

    `gradients` (MiB) is what every update must hold; the memory is compared with it and beyond it.
    """
    lean = min(theirs, key=lambda way: rows[way]["extra_mib"])
    fast = max(theirs, key=lambda way: rows[way]["tokens_per_s"])
    rounds = [b / a for a, b in zip(rows[ours]["seconds"], rows[fast]["seconds"], strict=True)]
    cpu = [b / a for a, b in zip(rows[ours]["cpu_seconds"], rows[fast]["cpu_seconds"], strict=True)]
    return {
        "memory": rows[ours]["extra_mib"] / rows[lean]["extra_mib"],
        "memory_beyond_gradients": (rows[ours]["extra_mib"] - gradients) / max(1.0, rows[lean]["extra_mib"] - gradients),
        "memory_with_rest": rows[ours]["peak_mib"] / rows[lean]["peak_mib"],
        "leanest": lean,
        "speed": median(rounds),
        "speed_range": [min(rounds), max(rounds)],
        "speed_by_cpu_time": median(cpu),
        "fastest": fast,
    }


def markdown(case: dict[str, Any]) -> str:
    """The tables of one vocabulary."""
    sizes, agreed = case["sizes"], case["agreement"]
    lines = [
        f"### Vocabulary {sizes['vocab']:,}",
        "",
        f"{case['parameters'] / 1e6:.1f}M parameters ({case['head_parameters'] / 1e6:.1f}M of them the tied embedding), "
        f"{sizes['layers']} layers of {sizes['hidden']}, fp32, {sizes['threads']} thread(s); {sizes['episodes']} episodes, "
        f"{case['tokens']:,} tokens, {case['sampled_tokens']:,} of them sampled ({case['padded_tokens']:,} with padding); "
        f"{sizes['rows']} rows or {sizes['micro_tokens']} tokens at once.",
        "",
        "| contender | memory of the update, MiB | process at its peak, MiB | tokens/s | CPU s |",
        "|---|---|---|---|---|",
    ]
    for way, row in case["contenders"].items():
        low, high = row["tokens_per_s_range"]
        speed = f"{row['tokens_per_s']:.0f} ({low:.0f} - {high:.0f})"
        lines.append(f"| {way} | {row['extra_mib']:.0f} | {row['peak_mib']:.0f} | {speed} | {median(row['cpu_seconds']):.2f} |")
    lines += ["", f"Gradients alone: {case['gradients_mib']:.0f} MiB.", ""]
    lines += ["| ours over theirs | beside | memory | beyond gradients | tokens/s | by CPU time |", "|---|---|---|---|---|---|"]
    for name, sides in case["ratios"].items():
        for side, r in sides.items():
            low, high = r["speed_range"]
            memory = f"{r['memory']:.2f} ({r['leanest']}) | {r['memory_beyond_gradients']:.2f}"
            speed = f"{r['speed']:.2f} ({low:.2f} - {high:.2f}; {r['fastest']}) | {r['speed_by_cpu_time']:.2f}"
            lines.append(f"| {name} | {side} | {memory} | {speed} |")
    verdict = "agree" if agreed["agree"] else "DO NOT AGREE"
    lines += [
        "",
        f"Losses and gradient norms {verdict}: at most {agreed['loss_gap']:.1e} and {agreed['norm_gap']:.1e} (relative) apart "
        f"(allowed: {agreed['loss_tolerance']:.0e}, {agreed['norm_tolerance']:.0e}).",
    ]
    return "\n".join(lines)

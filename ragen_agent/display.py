"""What a person sees of a run: a live table on a terminal, plain lines elsewhere, the comparison and the curve at the end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ragen_agent.evaluate import table
from ragen_agent.records import read

SHOWN = {  # metric -> heading and format
    "step": ("step", "{:.0f}"),
    "success": ("success", "{:.1%}"),
    "return": ("reward", "{:.2f}"),
    "group_std": ("group std", "{:.2f}"),
    "valid": ("well-formed", "{:.1%}"),
    "entropy": ("entropy", "{:.3f}"),
    "grad_norm": ("gradient", "{:.2f}"),
    "tokens_per_second": ("tokens/s", "{:.0f}"),
    "seconds": ("s", "{:.1f}"),
}
BARS = " ▁▂▃▄▅▆▇█"


class Display:
    """Shows a run; give it another console to send it elsewhere."""

    def __init__(self, console: Console | None = None, last: int = 12):
        """`last` rounds stand in the live table."""
        self.console, self.last = console or Console(), last
        self.rows: list[dict[str, Any]] = []
        self.live: Live | None = None
        self.lines = not self.console.is_terminal

    @contextmanager
    def running(self, steps: int, done: int, title: str) -> Iterator[None]:
        """Show the rounds while the body runs."""
        self.began, self.steps, self.done, self.title = time.monotonic(), steps, done, title
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("elapsed"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self.bar = Progress(*columns, console=self.console)
        self.task = self.bar.add_task("", total=steps, completed=done)
        if self.lines:
            self.console.print(title)
            yield
        else:
            with Live(self._picture(), console=self.console, refresh_per_second=4) as self.live:
                yield

    def say(self, text: str) -> None:
        """A line above the table."""
        self.console.print(text, soft_wrap=self.live is None)

    def before(self, rows: dict[str, dict[str, float]]) -> None:
        """The scores that training starts from."""
        parts = [f"{name} {row['success']:.1%} ({row['success_low']:.1%} to {row['success_high']:.1%})" for name, row in rows.items()]
        self.say("held-out success: " + ", ".join(parts))

    def step(self, row: dict[str, Any]) -> None:
        """A finished round."""
        self.rows.append(row)
        self.bar.advance(self.task)
        if self.live is not None:
            self.live.update(self._picture())
        else:
            shown = [f"{head} {style.format(row[name])}" for name, (head, style) in SHOWN.items() if name in row]
            done = len(self.rows)
            left = (time.monotonic() - self.began) / done * (self.steps - self.done - done)
            self.console.print("  ".join([*shown, f"ETA {left:.0f} s"]), soft_wrap=True)
        if "evaluation" in row:
            e = row["evaluation"]
            self.say(f"step {row['step']}: held-out success {e['success']:.1%} ({e['success_low']:.1%} to {e['success_high']:.1%})")

    def result(self, rows: dict[str, dict[str, float]], out: Path) -> None:
        """Before and after, between the random and the exact player; and where everything lies."""
        self.console.print(table({k: rows[k] for k in ("random", "before", "after", "exact")}, "held-out levels"))
        drawn = curve(out, rows)
        told = f"in {out}: metrics.jsonl, transcripts.jsonl, result.json, checkpoints step-*{', ' + drawn if drawn else ''}"
        self.console.print(told, soft_wrap=True)

    def _picture(self) -> Group:
        made = Table(title=self.title, title_justify="left", expand=False)
        for head, _ in SHOWN.values():
            made.add_column(head, justify="right", no_wrap=True)
        for row in self.rows[-self.last :]:
            made.add_row(*(style.format(row[name]) if name in row else "" for name, (_, style) in SHOWN.items()))
        return Group(made, Text("success " + spark([row["success"] for row in self.rows])), self.bar)


def spark(values: list[float], width: int = 60) -> str:
    """Values in [0, 1] as a line of bars, the last `width` of them."""
    return "".join(BARS[min(len(BARS) - 1, int(value * len(BARS)))] for value in values[-width:])


def curve(out: Path, rows: dict[str, dict[str, float]]) -> str:
    """Draw learning.png in `out` when matplotlib is installed; returns the file's name or ""."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return ""
    path = out / "metrics.jsonl"
    metrics = [row for row in read(path) if "success" in row] if path.exists() else []
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps, success = [row["step"] for row in metrics], [row["success"] for row in metrics]
    axes.plot(steps, success, label="training levels")
    axes.fill_between(steps, [r["success_low"] for r in metrics], [r["success_high"] for r in metrics], alpha=0.2)
    held = [(0, rows["before"])] + [(row["step"], row["evaluation"]) for row in metrics if "evaluation" in row]
    middle = [row["success"] for _, row in held]
    error = [[row["success"] - row["success_low"] for _, row in held], [row["success_high"] - row["success"] for _, row in held]]
    axes.errorbar([step for step, _ in held], middle, error, fmt="o", capsize=3, label="held-out levels (95 %)")
    for name, style in (("random", ":"), ("exact", "--")):
        axes.axhline(rows[name]["success"], linestyle=style, color="gray", label=f"{name} player")
    axes.set(xlabel="round", ylabel="success", ylim=(0, 1.02))
    axes.legend(loc="best", fontsize=8)
    figure.savefig(out / "learning.png", dpi=150)
    return "learning.png"

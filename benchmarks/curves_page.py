"""The training curves' page: what the runs' folders hold, compared over seeds, as markdown and as a figure in docs/."""

import json
from collections.abc import Sequence
from io import BytesIO
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from benchmarks.seeds import holm, t_interval, t_test
from ragen_agent.metrics import wilson
from ragen_agent.records import read, replace

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
WINDOW = 5  # rounds of training whose success is taken together to see a collapse
SMOOTH = 3  # rounds a point of a curve is the mean of
EDGE = 3  # first and last rounds whose entropy and in-group spread are told
BUDGET = ("model", "steps", "groups", "group_size", "minibatch", "epochs", "lr", "keep", "eval_episodes", "eval_temperature")
NOTE = """Success on held-out levels, in percent, of the last round, not the best. `t`: 95 % interval of the mean over seeds. `pooled`:
Wilson's 95 % interval of all seeds' episodes together, blind to how the seeds differ. `difference`: paired by seed, 95 % t interval.
`p`: two-sided paired t test, corrected for all cells of the table (Holm). `collapsed`: runs whose training success over the last five
rounds is below half of what it was over some five rounds before, their Wilson intervals apart. `entropy` and `in-group std`: first and
last three rounds."""
LEGEND = f"""Training success a round: mean over seeds of running means of {SMOOTH} rounds, and its 95 % t interval. Dotted: the random
player on the held-out levels."""


class Place(NamedTuple):
    """A comparison: where the runs of its cells lie."""

    title: str
    reference: str
    folders: dict[str, Path]  # cell -> folder of its seeds' folders


class Outcome(NamedTuple):
    """What one run left."""

    seed: int
    rounds: list[dict[str, Any]]  # of metrics.jsonl
    rows: dict[str, dict[str, float]]  # of result.json: before, after, random, exact; {}: not finished
    config: dict[str, Any]
    error: str  # its last words; "": none

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.rows)


class Scene(NamedTuple):
    """A comparison with its runs."""

    title: str
    reference: str
    cells: dict[str, list[Outcome]]  # only those with a run


# -- reading -----------------------------------------------------------------------------------------------------------------


def scenes(places: Sequence[Place]) -> list[Scene]:
    """The comparisons that have runs. Raises `ValueError` where none has."""
    found = [Scene(p.title, p.reference, {cell: made for cell, folder in p.folders.items() if (made := outcomes(folder))}) for p in places]
    if not any(scene.cells for scene in found):
        where = ", ".join(sorted({str(folder.parent) for place in places for folder in place.folders.values()}))
        raise ValueError(f"no runs in {where}")
    return [scene for scene in found if scene.cells]


def outcomes(folder: Path) -> list[Outcome]:
    """The runs of a cell, by seed; a folder without settings or error was never begun."""
    found = []
    for path in sorted((p for p in folder.glob("*") if p.name.isdigit()), key=lambda p: int(p.name)):
        config, result, error, metrics = (path / name for name in ("config.json", "result.json", "error.json", "metrics.jsonl"))
        if config.exists() or error.exists():
            words = json.loads(error.read_text())["words"] if error.exists() else []
            rounds = read(metrics) if metrics.exists() else []
            rows = json.loads(result.read_text())["rows"] if result.exists() else {}
            settings = json.loads(config.read_text()) if config.exists() else {}
            found.append(Outcome(int(path.name), rounds, rows, settings, words[-1] if words else ""))
    return found


# -- numbers over seeds ------------------------------------------------------------------------------------------------------


def pooled(made: Sequence[Outcome], row: str) -> tuple[float, float]:
    """Wilson's interval of the episodes of all finished runs together."""
    done = [outcome.rows[row] for outcome in made if outcome.finished]
    episodes = sum(int(r["episodes"]) for r in done)
    return wilson(sum(round(r["success"] * r["episodes"]) for r in done), episodes)


def differences(made: Sequence[Outcome], reference: Sequence[Outcome]) -> list[float]:
    """Final success less the reference's of the same seed, of the seeds that both have finished."""
    base = {outcome.seed: outcome.rows["after"]["success"] for outcome in reference if outcome.finished}
    return [outcome.rows["after"]["success"] - base[outcome.seed] for outcome in made if outcome.finished and outcome.seed in base]


def collapsed(rounds: Sequence[dict[str, Any]]) -> bool:
    """Whether training success over the last WINDOW rounds is below half of that over an earlier window, their intervals apart."""
    wins = [(round(r["success"] * r["episodes"]), int(r["episodes"])) for r in rounds]
    windows = [[sum(column) for column in zip(*wins[i : i + WINDOW], strict=True)] for i in range(len(wins) - WINDOW + 1)]
    if len(windows) <= WINDOW:  # none ends before the last begins
        return False
    now = windows[-1]
    best = max(windows[:-WINDOW], key=lambda w: w[0] / w[1])
    return now[0] / now[1] < best[0] / best[1] / 2 and wilson(*now)[1] < wilson(*best)[0]


def curve(made: Sequence[Outcome]) -> list[tuple[int, float, float, float]]:
    """(round, mean, low, high) of training success over the seeds, each a running mean of SMOOTH rounds; to where all seeds have come."""
    lines = [[r["success"] for r in outcome.rounds] for outcome in made if outcome.rounds]
    smooth = [[fmean(line[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(line))] for line in lines]
    return [(i + 1, *t_interval(values)) for i, values in enumerate(zip(*smooth, strict=False))]


# -- the table ---------------------------------------------------------------------------------------------------------------


def tables(found: Sequence[Scene]) -> str:
    """Every comparison as markdown."""
    return "\n\n".join([NOTE, *(table(scene) for scene in found)])


def table(scene: Scene) -> str:
    """One comparison: its budget, its players for scale, a row a cell, and what did not come to its end."""
    base = scene.cells.get(scene.reference, [])
    others = {cell: differences(made, base) for cell, made in scene.cells.items() if cell != scene.reference}
    ps = dict(zip(others, holm([t_test(values) for values in others.values()]), strict=True))
    head = ["cell", "seeds", "before", "after (t)", "after (pooled)", f"difference from {scene.reference}", "p", "", "collapsed"]
    lines = [f"### {scene.title}", "", budget(scene), "", f"| {' | '.join([*head, 'entropy', 'in-group std'])} |", "|---" * 11 + "|"]
    for cell, made in scene.cells.items():
        done = [outcome for outcome in made if outcome.finished]
        before, after = ([outcome.rows[name]["success"] for outcome in done] for name in ("before", "after"))
        columns = [cell, f"{len(done)} of {len(made)}", percent(t_interval(before)[0]), span(*t_interval(after))]
        columns.append(span(nan, *pooled(made, "after")) if done else "–")
        columns += compared(others[cell], ps[cell]) if cell in others else ["", "", "reference"]
        columns += [f"{sum(collapsed(o.rounds) for o in made)} of {len(made)}", edges(made, "entropy"), edges(made, "group_std")]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join([*lines, *unfinished(scene)])


def compared(values: Sequence[float], p: float) -> list[str]:
    """The difference, its p, and what they say in words."""
    mean, low, high = t_interval(values)
    if isnan(p):
        return [span(mean, low, high, clip=False), "–", "too few seeds to compare"]
    word = "does not separate" if p > 0.05 else "better" if mean > 0 else "worse"
    return [span(mean, low, high, clip=False), f"{p:.3f}" if p >= 0.001 else "< 0.001", word]


def budget(scene: Scene) -> str:
    """The settings that make the comparison fair, each with all its values, and the players for scale."""
    finished = [o for made in scene.cells.values() for o in made if o.finished]
    configs = [o.config for made in scene.cells.values() for o in made if o.config]
    values = {name: sorted({str(config[name]) for config in configs if name in config}) for name in BUDGET}
    told = ", ".join(f"{name.replace('_', ' ')} {' or '.join(seen)}" for name, seen in values.items() if seen)
    players = [f"{name} player {percent(finished[0].rows[name]['success'])}" for name in ("random", "exact") if finished]
    return "; ".join(filter(None, [told, ", ".join(players)])) + "."


def edges(made: Sequence[Outcome], name: str) -> str:
    """The mean over seeds of a metric's first and last rounds."""
    series = [[r[name] for r in outcome.rounds if name in r] for outcome in made]
    series = [line for line in series if line]
    if not series:
        return "–"
    return f"{fmean(fmean(line[:EDGE]) for line in series):.2f} → {fmean(fmean(line[-EDGE:]) for line in series):.2f}"


def unfinished(scene: Scene) -> list[str]:
    """A line for each run that did not come to its end, with its last words."""
    lines = []
    for cell, made in scene.cells.items():
        for outcome in made:
            if not outcome.finished:
                where = f"{len(outcome.rounds)} of {outcome.config.get('steps', '?')} rounds"
                lines.append(f"- {cell}, seed {outcome.seed}: {where}{': ' + outcome.error if outcome.error else ', not finished'}")
    return ["", "Not finished:", "", *lines] if lines else []


def percent(value: float, sign: str = "") -> str:
    """A share in percent."""
    return "–" if isnan(value) else f"{100 * value:{sign}.1f}"


def span(mean: float, low: float, high: float, clip: bool = True) -> str:
    """A mean and its interval in percent; `clip`: a share lies between 0 and 100. What is NaN is left out."""
    sign = "" if clip else "+"
    if clip and not isnan(low):
        low, high = max(0.0, low), min(1.0, high)
    bounds = "" if isnan(low) else f"({percent(low, sign)}, {percent(high, sign)})"
    return " ".join(filter(None, ["" if isnan(mean) else percent(mean, sign), bounds])) or "–"


# -- the page ----------------------------------------------------------------------------------------------------------------


def write(found: Sequence[Scene], docs: Path) -> None:
    """Put figure and tables into docs/curves.md between its markers, or begin it. Raises `ValueError` where the markers are missing."""
    page = docs / "curves.md"
    text = page.read_text() if page.exists() else f"# Training curves\n\n{BEGIN}\n{END}\n"
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} lacks the markers {BEGIN} and {END}")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    replace(docs / "figures" / "curves.png", draw(found))
    middle = f"![Training curves](figures/curves.png)\n\n{LEGEND}\n\n{tables(found)}"
    replace(page, f"{before}{BEGIN}\n\n{middle}\n\n{END}{after}".encode())


def draw(found: Sequence[Scene]) -> bytes:
    """The learning curves as a PNG, a panel per comparison."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 5.2 * rows), squeeze=False)
    for axis in axes.flat[len(found) :]:
        axis.set_axis_off()
    names = list(dict.fromkeys(cell for scene in found for cell in scene.cells))
    colours = {name: plt.get_cmap("tab20")(2 * i % 20 + 2 * i // 20) for i, name in enumerate(names)}
    for axis, scene in zip(axes.flat, found, strict=False):
        for cell, made in scene.cells.items():
            if points := curve(made):
                steps, mean, low, high = zip(*points, strict=True)
                axis.plot(steps, mean, color=colours[cell], linewidth=1.4, label=cell)
                axis.fill_between(
                    steps, [max(0.0, x) for x in low], [min(1.0, x) for x in high], color=colours[cell], alpha=0.1, linewidth=0
                )
        if (done := next((o for made in scene.cells.values() for o in made if o.finished), None)) is not None:
            axis.axhline(done.rows["random"]["success"], color="black", linestyle=":", linewidth=1)
        axis.set(title=scene.title, xlabel="round", ylabel="success in training", ylim=(0, 1))
        axis.legend(fontsize=7, ncols=2, loc="upper left")
    figure.tight_layout()
    file = BytesIO()
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3]  # pyright: ignore  (Agg's canvas has it)
    few = (np.round(pixels / 17) * 17).astype(np.uint8)  # 16 shades a colour, white among them: less than half the size
    plt.imsave(file, few, format="png", pil_kwargs={"optimize": True})
    plt.close(figure)
    return file.getvalue()

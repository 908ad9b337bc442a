"""The credit lab's page: docs/credit.md's table between its markers, and docs/figures/credit.png."""

from pathlib import Path
from typing import Any

from ragen_agent.records import replace

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
COLUMNS = {  # measure -> heading
    "bias": "bias",
    "std": "std",
    "correlation": "correlation",
    "scaled_bias": "bias, scaled",
    "scaled_std": "std, scaled",
    "gradient_cosine": "cosine of the mean gradient",
    "batch_cosine": "cosine of a batch's gradient",
}


def table(scene: str, row: dict[str, Any]) -> str:
    """One scene as a markdown table: value and half the width of its 95 % interval."""
    lines = [f"### {scene} (mean return {row['value']:.3f})", "", f"| estimator | {' | '.join(COLUMNS.values())} |", "|---" * 8 + "|"]
    for name, measures in row["estimators"].items():
        lines.append(f"| {name} | {' | '.join(cell(*measures[measure]) for measure in COLUMNS)} |")
    return "\n".join(lines)


def cell(value: float, low: float, high: float) -> str:
    """A value with its interval, as short as the interval allows."""
    digits = 3 if high - low < 0.2 else 2
    return f"{value:.{digits}f} ({low:.{digits}f}, {high:.{digits}f})"


def write(scenes: dict[str, Any], docs: Path) -> None:
    """Put the tables into docs/credit.md between its markers, and draw the figure. Raises `ValueError` where the markers are missing."""
    page = docs / "credit.md"
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} lacks the markers {BEGIN} and {END}")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    tables = "\n\n".join(table(scene, row) for scene, row in scenes.items())
    draw(scenes, docs / "figures" / "credit.png")
    replace(page, f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}".encode())


def draw(scenes: dict[str, Any], path: Path) -> None:
    """How well one batch's gradient points, and how strong a sample's advantage correlates with the exact one: a panel per scene."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(next(iter(scenes.values()))["estimators"])
    figure, axes = plt.subplots(1, len(scenes), figsize=(3.1 * len(scenes) + 2, 0.28 * len(names) + 1.4), sharey=True, squeeze=False)
    places = range(len(names))
    for axis, (scene, row) in zip(axes[0], scenes.items(), strict=True):
        for measure, colour, shift in (("batch_cosine", "tab:blue", -0.12), ("correlation", "tab:orange", 0.12)):
            values = [row["estimators"][name][measure] for name in names]
            middle = [v for v, _, _ in values]
            bars = [[v - low for v, low, _ in values], [high - v for v, _, high in values]]
            label = {"batch_cosine": "cosine of a batch's gradient", "correlation": "correlation of advantages"}[measure]
            axis.errorbar(middle, [p + shift for p in places], xerr=bars, fmt="o", ms=4, color=colour, label=label)
        axis.set_title(scene.replace(", ", "\n"), fontsize=9)
        axis.set_xlim(0, 1)
        axis.grid(alpha=0.3)
    axes[0][0].set_yticks(list(places), names, fontsize=8)
    axes[0][0].invert_yaxis()
    axes[0][0].legend(fontsize=7, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)

"""The training curves: intervals and tests over seeds by hand, table and figure of synthetic runs, how runs are made."""

import json
import math
import random
import sys

import pytest

from benchmarks import credit, curves, curves_page, needs, seeds
from benchmarks.curves_page import BEGIN, END, Outcome, Place
from ragen_agent import records, train
from ragen_agent.algos import find
from ragen_agent.settings import pairs

NAN = math.nan


def rounds(successes, **more):
    return [{"step": i, "episodes": 100, "success": s, **more} for i, s in enumerate(successes, start=1)]


def outcome(seed, successes=(), after=None, before=0.3, episodes=100, **more):
    def row(s):
        return {"success": s, "episodes": episodes}

    rows = {} if after is None else {"before": row(before), "after": row(after), "random": row(0.15), "exact": row(1.0)}
    return Outcome(seed, rounds(successes, **more), rows, {"steps": 30, "lr": 3e-4}, "")


def lay(folder, made):
    """Write a run as `ragen train` leaves it."""
    folder = folder / str(made.seed)
    records.write_json(folder / "config.json", made.config)
    for row in made.rounds:
        records.append(folder / "metrics.jsonl", row)
    if made.rows:
        records.write_json(folder / "result.json", {"rows": made.rows})
    if made.error:
        records.write_json(folder / "error.json", {"status": 2, "words": ["first", made.error]})


# -- numbers over seeds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([0.5, 0.6, 0.7], (0.6, 0.3515862, 0.8484138)),  # 4.302653 * .1 / sqrt(3) = .2484138
        ([0.2, 0.4], (0.3, -0.9706205, 1.5706205)),  # 12.706205 * .1414214 / sqrt(2)
        ([0.4, 0.4, 0.4], (0.4, 0.4, 0.4)),
        ([0.4], (0.4, NAN, NAN)),
        ([], (NAN, NAN, NAN)),
    ],
)
def test_t_interval(values, wanted):
    assert seeds.t_interval(values) == pytest.approx(wanted, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([0.1, 0.2, 0.3], 0.0741799),  # t = sqrt(12); with two degrees of freedom p = 1 - t / sqrt(t^2 + 2)
        ([-0.1, -0.2, -0.3], 0.0741799),
        ([0.1, 0.3], 0.2951672),  # t = 2; with one p = 1 - 2 atan(t) / pi
        ([0.0, 0.0], 1.0),
        ([0.25, 0.25], 0.0),
        ([0.1], NAN),
    ],
)
def test_paired_t_test(values, wanted):
    assert seeds.t_test(values) == pytest.approx(wanted, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),
        ([0.5, 0.4], [0.8, 0.8]),
        ([0.9, 0.8], [1.0, 1.0]),
        ([NAN, 0.02, 0.03], [NAN, 0.04, 0.04]),
        ([0.02], [0.02]),
        ([], []),
    ],
)
def test_holm(values, wanted):
    assert seeds.holm(values) == pytest.approx(wanted, abs=1e-6, nan_ok=True)


def test_pooled_episodes():
    made = [outcome(0, after=0.75, episodes=4), outcome(1, after=0.5, episodes=6), outcome(2)]
    assert curves_page.pooled(made, "after") == pytest.approx((0.3126738, 0.8318197), abs=1e-6)  # 6 of 10, by Wilson's formula


def test_differences_pair_by_seed_and_leave_out_what_has_no_partner():
    cell = [outcome(0, after=0.5), outcome(1, after=0.7), outcome(2, after=0.9), outcome(3)]
    reference = [outcome(2, after=0.4), outcome(1, after=0.1), outcome(3, after=0.2), outcome(0)]
    assert curves_page.differences(cell, reference) == pytest.approx([0.6, 0.5], abs=1e-6)


@pytest.mark.parametrize(
    ("successes", "wanted"),
    [
        ([0.6] * 5 + [0.29] * 5, True),  # 300 and 145 of 500
        ([0.6] * 5 + [0.31] * 5, False),  # more than half is left
        ([0.3] * 3 + [0.8] * 5 + [0.1] * 5, True),
        ([0.8] * 5 + [0.1] * 5 + [0.7] * 5, False),  # it came back
        ([0.3] * 5 + [0.9] * 5, False),
        ([0.02] * 5 + [0.01] * 4 + [0.0], False),  # 10 and 4 of 500: the intervals (.011, .036) and (.003, .020) overlap
        ([0.1] * 5 + [0.9] * 2 + [0.0] * 4, False),  # 90 of the last 500, at most 130 of five rounds before those
        ([0.9] * 4 + [0.0] * 5, False),  # no window of five ends before the last begins
        ([], False),
    ],
)
def test_collapse(successes, wanted):
    assert curves_page.collapsed(rounds(successes)) is wanted


def test_a_curve_is_the_mean_over_seeds_of_running_means_as_far_as_all_have_come():
    made = [outcome(0, [0.0, 0.3, 0.6, 0.9]), outcome(1, [0.2, 0.1, 0.3]), outcome(2)]
    points = curves_page.curve(made)
    assert [point[:2] for point in points] == [(1, pytest.approx(0.1)), (2, pytest.approx(0.15)), (3, pytest.approx(0.25))]
    assert points[2][2:] == pytest.approx((0.25 - 12.706205 * 0.05, 0.25 + 12.706205 * 0.05), abs=1e-6)  # .3 and .2
    assert curves_page.curve(made[:1])[3] == (4, pytest.approx(0.6), pytest.approx(NAN, nan_ok=True), pytest.approx(NAN, nan_ok=True))


# -- the page ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path):
    for seed, (base, sure, vague) in enumerate([(0.5, 0.7, 0.5), (0.51, 0.72, 0.7), (0.49, 0.69, 0.4)]):
        lay(tmp_path / "Base", outcome(seed, [0.4] * 10, base, entropy=0.5, group_std=3.0))
        lay(tmp_path / "Sure", outcome(seed, [0.6] * 5 + [0.2] * 5, sure))
        lay(tmp_path / "Vague", outcome(seed, [0.5] * 10, vague))
    lay(tmp_path / "Broken", outcome(0, [0.4] * 2)._replace(error="ragen: the gradient is not finite"))
    lay(tmp_path / "Broken", outcome(1, [0.4] * 3))
    return Place("A world", "Base", {name: tmp_path / name for name in ("Base", "Sure", "Vague", "Broken", "Never")})


def cells(text, name):
    return next([c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith(f"| {name} |"))


def test_the_table(place):
    text = curves_page.tables(curves_page.scenes([place]))
    assert "steps 30, lr 0.0003; random player 15.0, exact player 100.0." in text
    assert cells(text, "Base") == [
        *["Base", "3 of 3", "30.0", "50.0 (47.5, 52.5)", "(44.4, 55.6)", "", "", "reference", "0 of 3"],
        *["0.50 → 0.50", "3.00 → 3.00"],
    ]
    sure = cells(text, "Sure")
    assert sure[3] == "70.3 (66.5, 74.1)"  # 4.302653 * .0152753 / sqrt(3) = .0379459
    assert sure[5:9] == ["+20.3 (+18.9, +21.8)", "< 0.001", "better", "3 of 3"]  # t = 61: p = 1 - 61 / sqrt(3723) = .00027
    vague = cells(text, "Vague")  # 0, .19, -.09: 4.302653 * .1429452 / sqrt(3) = .3550957
    assert vague[5] == "+3.3 (-32.2, +38.8)" and vague[7] == "does not separate" and vague[9:] == ["–", "–"]
    assert cells(text, "Broken")[1] == "0 of 2" and cells(text, "Broken")[3:8] == ["–", "–", "–", "–", "too few seeds to compare"]
    assert "- Broken, seed 0: 2 of 30 rounds: ragen: the gradient is not finite" in text
    assert "- Broken, seed 1: 3 of 30 rounds, not finished" in text
    assert "Never" not in text


def test_worse_is_said_too():
    assert curves_page.compared([-0.2, -0.21, -0.19], 0.001) == ["-20.0 (-22.5, -17.5)", "0.001", "worse"]


def test_a_share_stays_a_share():
    assert curves_page.span(0.9, 0.7, 1.3) == "90.0 (70.0, 100.0)" and curves_page.span(NAN, NAN, NAN) == "–"


def test_the_page_keeps_what_is_around_its_markers(place, tmp_path):
    docs, found = tmp_path / "docs", curves_page.scenes([place])
    curves_page.write(found, docs)
    page = docs / "curves.md"
    assert page.read_text().startswith("# Training curves\n")
    page.write_text(f"mine\n\n{BEGIN}\nold\n{END}\n\nmine too\n")
    curves_page.write(found, docs)
    text = page.read_text()
    assert text.startswith(f"mine\n\n{BEGIN}\n") and text.endswith(f"{END}\n\nmine too\n") and "old" not in text and "| Sure |" in text
    image = (docs / "figures" / "curves.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) < 200_000
    page.write_text("no markers")
    with pytest.raises(ValueError, match="markers"):
        curves_page.write(found, docs)


def test_a_large_figure_is_a_small_file():
    """Eleven cells in two panels of 30 rounds and six in one of 100, with noise."""
    rng = random.Random(0)
    found = []
    for cells, length in ((11, 30), (11, 30), (6, 100)):
        made = {
            str(c): [outcome(s, [0.3 + 0.04 * c + rng.gauss(0, 0.03) for _ in range(length)], 0.5) for s in range(3)] for c in range(cells)
        }
        found.append(curves_page.Scene(f"{cells} cells, {length} rounds", "0", made))
    image = curves_page.draw(found)
    assert image.startswith(b"\x89PNG") and len(image) < 200_000


def test_no_runs_at_all(tmp_path):
    with pytest.raises(ValueError, match="no runs in"):
        curves_page.scenes([Place("t", "a", {"a": tmp_path / "a"})])


# -- the runs ----------------------------------------------------------------------------------------------------------------

STAND_IN = """
import json, pathlib, sys
given = [a.partition("=")[2] for a in sys.argv[1:] if a.startswith(("--out=", "--resume="))]
folder = pathlib.Path(given[0])
with (folder / "calls.txt").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + chr(10))
if (folder / "fail.txt").exists() or "--algo=ARPO" in sys.argv:
    print("ragen: it broke")
    print("+---+")  # as a frame around an error ends
    sys.exit(2)
if "--resume=" + given[0] not in sys.argv:
    (folder / "config.json").write_text(json.dumps({"env": "ragen/Sokoban-v0", "model": "embedded", "seed": int(folder.name)}))
    if "--algo=GRPO" in sys.argv:
        sys.exit(-9)
(folder / "result.json").write_text("{}")
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A command in the place of training: ARPO fails, GRPO dies in its first attempt, the others end well."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(curves, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(curves, "differences", lambda one: "")
    return tmp_path / "runs"


def test_runs_are_made_taken_up_and_left_alone_and_no_error_is_lost(stand_in, capsys):
    config = curves.Curves("run", worlds=("sokoban",), cells=("ARPO", "GRPO", "PPO"), seeds=2, jobs=2, out=stand_in)
    assert curves.main(config) == 1
    told = capsys.readouterr().out
    assert "sokoban/PPO/1: done" in told and "failed with status 2: ragen: it broke" in told and "4 of 6 runs failed" in told
    error = json.loads((stand_in / "sokoban" / "ARPO" / "0" / "error.json").read_text())
    assert error["status"] == 2 and error["words"][-2:] == ["ragen: it broke", "+---+"]
    assert curves.main(config) == 1
    told = capsys.readouterr().out
    assert "sokoban/PPO/1: there already" in told and "sokoban/GRPO/0: done" in told and "2 of 6 runs failed" in told
    grpo = stand_in / "sokoban" / "GRPO" / "0"
    calls = (grpo / "calls.txt").read_text().splitlines()
    assert [call.split()[0] for call in calls] == [f"--out={grpo}", f"--resume={grpo}"]  # never anything beside --resume
    assert calls[1] == f"--resume={grpo}" and not (grpo / "error.json").exists()
    assert len((stand_in / "sokoban" / "PPO" / "0" / "calls.txt").read_text().splitlines()) == 1


@pytest.mark.parametrize(("change", "wanted"), [({}, ""), ({"lr": 1e-3}, "lr 0.001, not 0.0003"), ({"threads": 8, "samples": 5}, "")])
def test_a_folder_with_another_run_is_not_taken_for_this_one(tmp_path, change, wanted):
    one = next(curves.runs(curves.Curves("run", cells=("PPO bi-level",), out=tmp_path)))
    there = train.plain(train.Train(**{**one.settings, **change}))
    records.write_json(one.folder / "config.json", there)
    assert curves.differences(one) == wanted
    if wanted:
        assert wanted in curves.attempt(one)


def test_seeds_come_in_rounds_and_flags_give_way_to_the_cell():
    config = curves.Curves("run", tables=("main", "trap"), seeds=2, flags=("steps=3", "group-size=4", "keep=0.5"), lake_model="mine")
    made = list(curves.runs(config))
    cells = len(curves.TABLES["main"].cells) + len(curves.TABLES["trap"].cells)
    assert len(made) == 2 * 2 * cells and {one.folder.name for one in made[: 2 * cells]} == {"0"}
    assert len({one.folder for one in made}) == len(made)
    settings = {"/".join(one.folder.parts[-3:]): one.settings for one in made}
    assert {s["steps"] for s in settings.values()} == {3} and {s["group_size"] for s in settings.values()} == {4}
    assert settings["lake/GRPO/1"]["model"] == "mine" and settings["sokoban/GRPO/1"]["model"] == "embedded"
    assert settings["lake/GRPO/1"]["seed"] == 1 and settings["lake-trap/GRPO/0"]["lr"] == 1e-3
    assert settings["sokoban/GRPO/0"]["keep"] == 0.5 and settings["sokoban/StarPO-S/0"]["keep"] == 0.25


@pytest.mark.parametrize("table", curves.TABLES)
def test_every_cell_is_a_run_that_can_be(table):
    """Its optimizer is there and knows its settings, and no two cells are the same run."""
    cells = curves.TABLES[table].cells
    assert curves.TABLES[table].reference in cells
    for settings in cells.values():
        config = train.Train(**{**curves.TABLES[table].shared, **settings})
        config.check_learning()
        assert pairs(config.algo_args).keys() <= find(config.algo).settings().keys()
    assert len({json.dumps(settings, sort_keys=True) for settings in cells.values()}) == len(cells)


def test_an_unknown_cell_names_the_known():
    with pytest.raises(ValueError, match="known: ARPO, BRPO"):
        list(curves.runs(curves.Curves("run", cells=("TRPO",))))


@pytest.mark.slow
def test_a_run_of_one_round(tmp_path, capsys):
    flags = ("steps=1", "groups=2", "group_size=2", "eval_episodes=4", "max_tokens=8")
    config = curves.Curves("run", worlds=("sokoban",), cells=("PPO",), seeds=1, flags=flags, out=tmp_path)
    assert curves.main(config) == 0
    config.verb = "table"
    assert curves.main(config) == 0
    assert "| PPO | 1 of 1 |" in capsys.readouterr().out


def test_what_is_not_installed_is_said_before_the_work(monkeypatch):
    monkeypatch.setattr(needs, "find_spec", lambda name: None if name == "scipy" else object())
    table, plot = curves.Curves("table"), curves.Curves("plot")
    for call in (lambda: curves.main(table), lambda: curves.main(plot), lambda: credit.run(credit.Credit())):
        with pytest.raises(ValueError, match=r"needs scipy: pip install.*\[bench\]"):
            call()

"""The signs of a run's health: its rows, smoothed, against their own beginning. Functions on a plain dict that a checkpoint can hold."""

from itertools import pairwise
from math import isfinite, sqrt
from statistics import fmean, median
from typing import Any

State = dict[str, Any]
Row = dict[str, Any]

SIGNALS = ("success", "group_std", "flat_groups", "entropy", "grad_norm", "reply_tokens", "valid", "sampler_gap_max", "clip_fraction")
LIKE = ("repetition", "repetition_across")
ALPHA = 0.3  # weight of the newest row in a smoothed signal: it remembers about five rows
FIRST = 5  # rows that say what a signal "was"; as many must be seen before anything is said
RAGEN_FIRST = 10  # rows whose mean is the base of RAGEN's variance rule
LAST = 40  # rows in which a rise is looked for
LOW, LOW_LEAVE = 0.3, 0.5  # a signal is low below this share of what it was, until it is above that one
FLAT, FLAT_LEAVE = 0.9, 0.75  # share of flat groups
SPIKE, SPIKES, BROKEN = 5.0, 3, 2  # a gradient that many times the usual; so many of the last ten rows, and of broken ones
CLIMB, CLIMB_LEAVE = 0.03, 0.1  # a rise of smoothed success within ten rows that speaks against the echo trap, and that ends it
CLIPPED, GAP = 0.3, 1.0  # a share of tokens; nats
GOOD = 0.7  # a policy that plays this well, between the random player (0) and the exact one (1), is not in the echo trap
RAGEN_ROWS, RAGEN_EMPTY, RAGEN_FAILING = 10, 5, 5
SMALLEST = 1e-6  # a spread below it is none


def fresh(exact: float | None = None, random: float | None = None) -> State:
    """The state before the first row; `exact` and `random` are those players' success on the levels in play, None: not known."""
    return {
        "exact": exact,
        "random": random,
        "rows": 0,
        "step": 0,
        "first": {},  # signal -> its first values, at most RAGEN_FIRST
        "smooth": {},  # signal -> [weighted sum, weight]
        "recent": {"success": [], "grad_norm": [], "level": [], "spike": [], "broken": []},
        "best": [0.0, 0, 0],  # the highest smoothed success, its step and its row
        "good": 0,  # the last step at which the policy played well
        "most": 0.0,  # the largest smoothed spread
        "low_since": {},  # signal -> the first step of its present run of low rows (success: well below its best)
        "streak": {"thin": 0, "empty": 0, "failing": 0},
    }


def take(state: State, row: Row) -> None:
    """Put a row of metrics.jsonl into the state. What is missing is not there; what is not finite is counted as broken and left out."""
    state["rows"] += 1
    state["step"] = int(row.get("step", state["step"] + 1))
    numbers = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
    good = {name: value for name, value in numbers.items() if isfinite(value)}
    if "entropy" not in good and "surprise" in good:
        good["entropy"] = good["surprise"]  # a round without an update has no entropy; the sampler's estimate is of the same quantity
    for name in LIKE:
        if name in good:
            good[f"new_{name}"] = 1 - good[name]
    recent = state["recent"]
    usual = median(recent["grad_norm"]) if len(recent["grad_norm"]) >= FIRST else 0.0
    _push(recent["broken"], float(len(good) < len(numbers) or good.get("skipped", 0) > 0), 10)
    _push(recent["spike"], float(usual > 0 and good.get("grad_norm", 0.0) > SPIKE * usual), 10)
    _push(recent["grad_norm"], good.get("grad_norm"), 20)
    _push(recent["success"], good.get("success"), LAST)
    for name in (*SIGNALS, *(f"new_{name}" for name in LIKE)):
        if name in good:
            _signal(state, name, good[name])
    _push(recent["level"], now(state, "success"), 11)
    state["best"] = max(state["best"], [now(state, "success") or 0.0, state["step"], state["rows"]], key=lambda best: best[0])
    state["good"] = state["step"] if level(state) >= GOOD else state["good"]
    state["most"] = max(state["most"], now(state, "group_std") or 0.0)
    if "success" in good:
        _low(state, "success", good["success"], 0.7 * state["best"][0], 0.75 * state["best"][0])
    _rules(state, good, row)


def _push(values: list[float], value: float | None, most: int) -> None:
    if value is not None:
        values.append(value)
        del values[:-most]


def _signal(state: State, name: str, value: float) -> None:
    first, smooth = state["first"].setdefault(name, []), state["smooth"].setdefault(name, [0.0, 0.0])
    if len(first) < RAGEN_FIRST:
        first.append(value)
    state["smooth"][name] = [(1 - ALPHA) * old + ALPHA * new for old, new in zip(smooth, (value, 1.0), strict=True)]
    if name != "success":
        _low(state, name, value, LOW * was(state, name), LOW_LEAVE * was(state, name))


def _low(state: State, name: str, value: float, enter: float, leave: float) -> None:
    if value < enter:
        state["low_since"].setdefault(name, state["step"])
    elif value >= leave:
        state["low_since"].pop(name, None)


def _rules(state: State, good: Row, row: Row) -> None:
    """RAGEN's early stopping: rows in a row with little variance, with nothing left by the filter, validations without success."""
    streak, first = state["streak"], state["first"].get("group_std", [])
    if "group_std" in good and state["rows"] > RAGEN_FIRST <= len(first):
        streak["thin"] = streak["thin"] + 1 if good["group_std"] < 0.1 * fmean(first) else 0
    if "kept" in good:
        streak["empty"] = streak["empty"] + 1 if good["kept"] == 0 else 0
    if "evaluation" in row:
        streak["failing"] = streak["failing"] + 1 if row["evaluation"]["success"] < 0.01 else 0


# -- reading the state -------------------------------------------------------------------------------------------------------


def now(state: State, name: str) -> float | None:
    """A signal, smoothed: the exponential mean, corrected for its beginning. None: never seen."""
    total, weight = state["smooth"].get(name, (0.0, 0.0))
    return total / weight if weight else None


def was(state: State, name: str) -> float:
    """What a signal was: the median of its first rows, or the very first if that is more: a run can fall within five rows.

    The spread may begin at nothing and grow; it was its largest smoothed value.
    """
    first = state["first"].get(name, [0.0])
    return max(median(first[:FIRST]), first[0], state["most"] if name == "group_std" else 0.0)


def level(state: State, success: float | None = None) -> float:
    """Success (default: smoothed) on the scale where the random player is 0 and the exact one 1; unknown players are taken as 0 and 1.

    Where the exact player is no better than the random one, 1 is as good as that, unless that is nothing.
    """
    success = (now(state, "success") or 0.0) if success is None else success
    low, high = state["random"] or 0.0, 1.0 if state["exact"] is None else state["exact"]
    return (success - low) / (high - low) if high > low else float(success >= high > 0)


def rise(state: State) -> tuple[float, float]:
    """How much higher the later half of the last rows' success is than the earlier half, and the standard error of that."""
    values = state["recent"]["success"]
    half = len(values) // 2
    if half < FIRST:
        return 0.0, 1.0
    old, new = values[-2 * half : -half], values[-half:]
    spread = sum((v - fmean(part)) ** 2 for part in (old, new) for v in part) / (2 * half - 2)
    return fmean(new) - fmean(old), sqrt(2 * spread / half)


def climbing(state: State, by: float = CLIMB) -> bool:
    """Whether the smoothed success is higher than ten rows ago, by more than `by`."""
    levels = state["recent"]["level"]
    return bool(levels) and levels[-1] - levels[0] > by


def noise(state: State) -> float:
    """The standard deviation of a row's success around its course: the median difference of neighbours, which trends and jumps hardly move.

    Two neighbours of standard deviation s differ by .9539 s in the median.
    """
    values = state["recent"]["success"]
    return median(abs(b - a) for a, b in pairwise(values)) / 0.9539 if len(values) > 1 else 0.0


def signs(state: State, verdict: str = "") -> dict[str, str]:
    """The signs that stand, name -> reason. What `verdict` rests on is left later than it is entered (hysteresis)."""
    low = LOW_LEAVE if verdict == "echo trap" else LOW
    told = {**_narrow(state, low), **_broken(state)}
    flat = now(state, "flat_groups")
    if flat is not None and flat >= (FLAT_LEAVE if verdict == "no signal" else FLAT):
        told["flat"] = f"{flat:.0%} of the groups have equal returns"
    streak = state["streak"]
    if streak["thin"] >= RAGEN_ROWS:
        told["ragen_variance"] = (
            f"std below a tenth of its first {RAGEN_FIRST} rounds' mean for {streak['thin']} rounds (RAGEN stops at 10)"
        )
    if streak["empty"] >= RAGEN_EMPTY:
        told["ragen_empty"] = f"the filter kept nothing in {streak['empty']} rounds in a row (RAGEN stops at 5)"
    if streak["failing"] >= RAGEN_FAILING:
        told["ragen_failing"] = f"under 1 % success in {streak['failing']} validations in a row (RAGEN stops at 5)"
    seen, (gain, error), stalled = len(state["recent"]["success"]), rise(state), verdict == "stalled"
    if gain > max(0.02, (3 if stalled else 2) * error):
        told["rising"] = f"success up by {gain:.2f} within {seen} rounds"
    elif seen == LAST and gain < max(0.01, (3 if stalled else 1) * error):
        told["stuck"] = f"no rise in success for {LAST} rounds ({gain:+.2f}, standard error {error:.2f})"
    return told


def _narrow(state: State, low: float) -> dict[str, str]:
    """The echo trap's own signs: what the replies have lost."""
    told = {}
    for sign, name, text in (
        ("spread", "group_std", "std {0:.2g} (was {1:.2g})"),
        ("entropy", "entropy", "entropy {0:.2g} (was {1:.2g})"),
        ("repeats", "new_repetition", "{2:.0%} of a reply repeated in its group (was {3:.0%})"),
        ("template", "new_repetition_across", "{2:.0%} of a reply repeated across levels (was {3:.0%})"),
    ):
        value, base = now(state, name), was(state, name)
        if value is not None and base > SMALLEST and value < low * base:
            told[sign] = text.format(value, base, 1 - value, 1 - base)
    flat = state["first"].get("flat_groups", [0.0])
    if min(flat[0], median(flat[:FIRST])) >= FLAT:
        told.pop("spread", None)  # there was none to lose, but for rounding or a penalty here and there
    length, base = now(state, "reply_tokens"), was(state, "reply_tokens")
    if length is not None and base > 0 and not 0.5 <= length / base <= 2:
        told["length"] = f"{length:.0f} tokens a reply (was {base:.0f})"
    valid, base = now(state, "valid"), was(state, "valid")
    if valid is not None and valid < min(0.7 * base, base - 0.1):
        told["form"] = f"{valid:.0%} of the replies well-formed (were {base:.0%})"
    return told


def _broken(state: State) -> dict[str, str]:
    """What tells of steps that are too large, or of numbers that are wrong."""
    told, recent = {}, state["recent"]
    if sum(recent["broken"]) >= BROKEN:
        told["broken"] = f"{sum(recent['broken']):.0f} of the last {len(recent['broken'])} rounds had numbers that are not finite"
    if sum(recent["spike"]) >= SPIKES:
        told["spikes"] = f"the gradient was over {SPIKE:.0f} times the usual in {sum(recent['spike']):.0f} of the last 10 rounds"
    clip, gap = now(state, "clip_fraction"), now(state, "sampler_gap_max")
    if clip is not None and clip > CLIPPED:
        told["clip"] = f"{clip:.0%} of the tokens clipped"
    if gap is not None and gap > GAP:
        told["gap"] = f"sampler and trainer differ by up to {gap:.1f} nats a token"
    entropy, base = now(state, "entropy"), was(state, "entropy")
    gain, error = rise(state)
    if entropy is not None and entropy > max(2 * base, base + 0.3) and gain <= max(0.02, 2 * error):
        told["noise"] = f"entropy {entropy:.2g} (was {base:.2g})"
    success, (best, step, row) = now(state, "success") or 0.0, state["best"]
    sure = (4 if row < FIRST else 3) * noise(state)  # a best of the first rows is not smooth yet
    if best - success > max(0.1, 0.3 * best, sure):
        told["fell"] = f"success {success:.2f}, down from {best:.2f} around step {step}"
    return told

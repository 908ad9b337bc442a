"""Lines of JSON, in and out: what a run leaves on disk, readable after a kill at any moment."""

import json
import os
from collections.abc import Callable
from dataclasses import fields
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np

from ragen_agent.types import Reply, Trajectory, Turn

Row = dict[str, Any]
TOKENS = ("prompt_ids", "ids", "logprobs")  # the fields of a Reply that only training needs


def dumps(value: Any) -> str:
    """One line of ASCII JSON. numpy scalars become Python's; NaN and infinities are a ValueError, any other type a TypeError."""
    return json.dumps(value, allow_nan=False, default=_plain)


def append(path: Path, row: Row) -> None:
    """Add `row` as the last line of `path`, in one write; a torn line that a killed process left there is dropped first."""
    line = dumps(row).encode() + b"\n"
    if _torn(path):
        truncate(path, lambda _: True)
    try:
        with path.open("ab") as file:
            file.write(line)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk names no file


def read(path: Path) -> list[Row]:
    """Every row of `path`. A torn last line (a writer was killed) is dropped; any other broken line is a ValueError with its number."""
    rows = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # no newline after it: the write was cut
                break
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object but {type(row).__name__}")
        rows.append(row)
    return rows


def truncate(path: Path, keep: Callable[[Row], bool]) -> None:
    """Rewrite `path` without the rows for which `keep` is False, by rename: a reader sees the old file or the new one."""
    replace(path, b"".join(dumps(row).encode() + b"\n" for row in read(path) if keep(row)))


def write_json(path: Path, value: Any) -> None:
    """`value` as an indented JSON file, by rename; the old file stays whole until the new one is on the disk."""
    text = json.dumps(value, allow_nan=False, default=_plain, indent=2)
    replace(path, text.encode() + b"\n")


def read_json(path: Path) -> Any:
    """What `write_json` wrote. `ValueError` with the file's name where it is not JSON."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error


def replace(path: Path, data: bytes) -> None:
    """Make `data` the content of `path`: written beside it, flushed to the disk, renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder's list of names to the disk, so that a rename in it survives a power cut."""
    if os.name == "nt":  # Windows cannot open a folder
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def to_row(trajectory: Trajectory, ids: bool = True) -> Row:
    """A trajectory as a JSON object; without `ids` the tokens and their logprobs are left out, which makes it about ten times smaller.

    A reward that is not finite is null, and NaN when it is read.
    """
    turns = [{**vars(turn), "reply": _said(turn.reply, ids), "reward": _paid(turn.reward)} for turn in trajectory.turns]
    return {**vars(trajectory), "turns": turns}


def from_row(row: Row) -> Trajectory:
    """The trajectory of a row. Keys that a trajectory does not have (a run's step) are left aside; a missing one is a KeyError."""
    own = {spec.name: row[spec.name] for spec in fields(Trajectory)}
    own["turns"] = [_turn(**turn) for turn in row["turns"]]
    return Trajectory(**own)


def _turn(reply: Row, reward: float | None, **rest: Any) -> Turn:
    return Turn(Reply(**reply), reward=nan if reward is None else reward, **rest)


def _paid(reward: float) -> float | None:
    return reward if isfinite(reward) else None


def _said(reply: Reply, ids: bool) -> Row:
    return {name: value for name, value in reply._asdict().items() if ids or name not in TOKENS}


def _torn(path: Path) -> bool:
    """Whether `path` ends within a line."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"not JSON: {value!r} ({type(value).__name__})")

"""Levels in and out: XSB and FrozenLake map files, the packs that ship with the package, and splits by board content."""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

XSB = "# .$*@+"
LAKE = "SFHG"
SPLITS = ("train", "val", "test")
_FLOOR = str.maketrans("-_", "  ")


class Level(NamedTuple):
    """One board: its title and its rows, all of one length, in the characters of `XSB` or `LAKE`."""

    title: str
    rows: tuple[str, ...]


class Pack(NamedTuple):
    """A file of held-out boards in `data/`: its name, its characters and its (rows, columns)."""

    file: str
    alphabet: str
    shape: tuple[int, int]


PACKS = {
    "ragen/simple": Pack("ragen_val_simple_6x6_1box.txt", XSB, (6, 6)),
    "ragen/large": Pack("ragen_val_large_8x8_2box.txt", XSB, (8, 8)),
    "ragen/lake-p80": Pack("ragen_val_frozen_lake_4x4_p80.txt", LAKE, (4, 4)),
    "ragen/lake-p90": Pack("ragen_val_frozen_lake_4x4_p90.txt", LAKE, (4, 4)),
    "boxoban/unfiltered-test": Pack("boxoban_unfiltered_test_000.txt", XSB, (10, 10)),
    "boxoban/hard": Pack("boxoban_hard_000.txt", XSB, (10, 10)),
}


# -- files -----------------------------------------------------------------------------------------------------------------


def read(text: str, source: str = "levels", alphabet: str | None = None) -> list[Level]:
    """The levels of a file's text; `alphabet` is `XSB`, `LAKE` or None (told from the first row).

    A level is its rows, under a line `; title` if it has one; a blank line or the next title ends it. Levels without a title
    are numbered from 0. XSB floors may be written `-` or `_`, and XSB rows may be ragged where walls close them.
    Raises `ValueError` with source, line number and reason.
    """
    levels: list[Level] = []
    rows: list[str] = []
    title, titled, begun = "", 0, 0
    for number, line in enumerate([*text.lstrip("\ufeff").splitlines(), "", ";"], 1):
        line = line.rstrip()
        if line and line[0] != ";":
            begun = number if not rows else begun
            rows.append(line)
            continue
        if rows:
            alphabet = alphabet or (LAKE if set(rows[0]) <= set(LAKE) else XSB)
            levels.append(Level(title or str(len(levels)), _check(rows, f"{source}, line ", begun, alphabet)))
            rows, title, titled = [], "", 0
        if line and titled:
            raise ValueError(f"{source}, line {titled}: the title {title!r} has no rows under it")
        if line[1:].strip():
            title, titled = line[1:].strip(), number
    if not levels:
        raise ValueError(f"{source}, line 1: no levels; a level is rows of {alphabet or XSB!r} or {LAKE!r} under a line '; title'")
    return levels


def load(levels: str | Path | Sequence[str], alphabet: str | None = None) -> list[Level]:
    """The levels of a pack (its name in `PACKS`), of a file (its path), or of a list of level texts.

    Raises `ValueError` for what is none of these, for malformed levels, and for levels not in `alphabet` when one is given.
    """
    if isinstance(levels, str) and levels in PACKS:
        if alphabet not in (None, PACKS[levels].alphabet):
            fitting = ", ".join(name for name, pack in PACKS.items() if pack.alphabet == alphabet)
            raise ValueError(f"the pack {levels!r} is of another world; fitting packs: {fitting}")
        return list(_pack(levels))
    if not isinstance(levels, str | Path):
        found = [level for number, text in enumerate(levels) for level in read(text, f"levels[{number}]", alphabet)]
        if not found:
            raise ValueError("levels is an empty list")
        return found
    try:
        return read(Path(levels).read_text(encoding="utf-8"), str(levels), alphabet)
    except OSError as error:
        raise ValueError(f"unknown levels {str(levels)!r}: no such pack or file; known packs: {', '.join(PACKS)}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{levels}: not a text file ({error.reason})") from error


def read_one(text: str, alphabet: str, shape: tuple[int, int]) -> tuple[str, ...]:
    """The rows of the single level written in `text`, which must fit into `shape` (rows, columns); else a `ValueError`."""
    found = read(text, "level", alphabet)
    if len(found) != 1:
        raise ValueError(f"level is the text of one level, not of {len(found)}")
    rows = found[0].rows
    if len(rows) > shape[0] or len(rows[0]) > shape[1]:
        raise ValueError(f"the level is {len(rows)}x{len(rows[0])}, larger than {shape[0]}x{shape[1]}: make the env with levels=[text]")
    return rows


@lru_cache
def _pack(name: str) -> tuple[Level, ...]:
    pack = PACKS[name]
    return tuple(read((files("ragen_envs") / "data" / pack.file).read_text(encoding="utf-8"), name, pack.alphabet))


def _check(rows: list[str], where: str, begun: int, alphabet: str) -> tuple[str, ...]:
    """The rows made rectangular, or a `ValueError` that says what is wrong in which line."""
    if alphabet == XSB:
        margin = min(len(row) - len(row.lstrip()) for row in rows)
        rows = [row[margin:].translate(_FLOOR) for row in rows]
    for number, row in enumerate(rows, begun):
        for symbol in row:
            if symbol not in alphabet:
                raise ValueError(f"{where}{number}: unknown symbol {symbol!r}; known: {' '.join(map(repr, alphabet))}")
        if len(row) != len(rows[0]) and (alphabet != XSB or row[-1] != "#"):
            raise ValueError(f"{where}{number}: the row is {len(row)} cells long, the first one {len(rows[0])}")
    board = "".join(rows)
    if alphabet == LAKE:
        for symbol, what in (("S", "start"), ("G", "goal")):
            if board.count(symbol) != 1:
                raise ValueError(f"{where}{begun}: a map has one {what} {symbol!r}, not {board.count(symbol)}")
        return tuple(rows)
    players, boxes, targets = (sum(board.count(symbol) for symbol in kind) for kind in ("@+", "$*", ".*+"))
    if players != 1:
        raise ValueError(f"{where}{begun}: a level has one player '@' or '+', not {players}")
    if boxes != targets or not boxes:
        raise ValueError(f"{where}{begun}: a level has as many boxes as targets and at least one, not {boxes} and {targets}")
    return _close(rows, f"{where}{begun}")


def _close(rows: list[str], where: str) -> tuple[str, ...]:
    """Fill what lies outside the walls with wall; anything but floor outside is a `ValueError`."""
    width = max(map(len, rows))
    cells = [list(row.ljust(width)) for row in rows]
    edge = [(r, c) for r in range(len(rows)) for c in range(width) if r in (0, len(rows) - 1) or c in (0, width - 1)]
    while edge:
        r, c = edge.pop()
        if not (0 <= r < len(rows) and 0 <= c < width) or cells[r][c] == "#":
            continue
        if cells[r][c] != " ":
            raise ValueError(f"{where}: the level is not closed by walls ({cells[r][c]!r} is open to the outside)")
        cells[r][c] = "#"
        edge += [(r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)]
    return tuple("".join(row) for row in cells)


# -- splits ----------------------------------------------------------------------------------------------------------------


def symmetries(rows: Sequence[str]) -> list[tuple[str, ...]]:
    """The 8 turned and mirrored forms of a board (4 turns, each also mirrored left to right), the board itself first."""
    boards = []
    board = tuple(rows)
    for _ in range(4):
        boards += [board, tuple(row[::-1] for row in board)]
        board = tuple("".join(column) for column in zip(*board[::-1], strict=True))
    return boards


def canonical(rows: Sequence[str]) -> str:
    """One text for a board and all its symmetric copies: the least of the 8, rows joined by newlines."""
    return "\n".join(min(symmetries(rows)))


@lru_cache
def _held_out(lake: bool, shape: frozenset[int]) -> frozenset[str]:
    packs = (name for name, pack in PACKS.items() if (pack.alphabet == LAKE) == lake and frozenset(pack.shape) == shape)
    return frozenset(canonical(level.rows) for name in packs for level in _pack(name))


def split_of(rows: Sequence[str]) -> str:
    """The split of a board, the same for all its symmetric copies, in every process: "train", "val" or "test".

    Boards of the shipped packs are "test", so that nobody trains on RAGEN's validation boards or on Boxoban's; of all others
    80 % are "train", 10 % "val" and 10 % "test", by a hash of the board. Splits by seed would not do: the one-box 6x6 world is
    so small that most of RAGEN's validation boards occur again under its training seeds.
    """
    board = canonical(rows)
    if board in _held_out("#" not in board, frozenset((len(rows), len(rows[0])))):
        return "test"
    share = int.from_bytes(blake2b(board.encode(), digest_size=8).digest(), "big") % 100
    return "train" if share < 80 else "val" if share < 90 else "test"

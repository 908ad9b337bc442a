"""Tiles: a tile's name -> shapes, drawn in code with smooth edges at any size.

A shape is a function of the coordinates (x to the right, y down, the cell is the unit square) that returns the signed distance
to its edge, negative inside. A tile is a stack of (shape, colour), painted from the bottom up.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import numpy as np

Shape = Callable[[np.ndarray, np.ndarray], np.ndarray]
Colour = tuple[int, int, int]
Layers = tuple[tuple[Shape, Colour], ...]


def disc(cx: float, cy: float, rx: float, ry: float | None = None) -> Shape:
    """A disc, or an upright ellipse with radii `rx` and `ry` (its distance is then approximate)."""
    ry = rx if ry is None else ry
    return lambda x, y: (np.hypot((x - cx) / rx, (y - cy) / ry) - 1) * min(rx, ry)


def block(left: float, top: float, right: float, bottom: float, corner: float = 0.0) -> Shape:
    """A rectangle with corners rounded by the radius `corner`."""
    cx, cy, hx, hy = (left + right) / 2, (top + bottom) / 2, (right - left) / 2 - corner, (bottom - top) / 2 - corner

    def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        dx, dy = np.abs(x - cx) - hx, np.abs(y - cy) - hy
        return np.hypot(np.maximum(dx, 0), np.maximum(dy, 0)) + np.minimum(np.maximum(dx, dy), 0) - corner

    return distance


def stroke(width: float, *points: tuple[float, float]) -> Shape:
    """A line of the given width with round ends through the points."""

    def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        best = np.full(np.broadcast(x, y).shape, np.inf)
        for (x0, y0), (x1, y1) in pairwise(points):
            along = ((x - x0) * (x1 - x0) + (y - y0) * (y1 - y0)) / ((x1 - x0) ** 2 + (y1 - y0) ** 2)
            along = np.clip(along, 0, 1)
            best = np.minimum(best, np.hypot(x - x0 - along * (x1 - x0), y - y0 - along * (y1 - y0)))
        return best - width / 2

    return distance


def wedge(*points: tuple[float, float]) -> Shape:
    """A convex polygon; the points go clockwise as seen on the screen."""

    def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        edges = []
        for (x0, y0), (x1, y1) in pairwise((*points, points[0])):
            edges.append(((x - x0) * (y1 - y0) - (y - y0) * (x1 - x0)) / np.hypot(x1 - x0, y1 - y0))
        return np.maximum.reduce(edges)

    return distance


def ring(shape: Shape, width: float) -> Shape:
    """The outline of a shape, as a band of the given width."""
    return lambda x, y: np.abs(shape(x, y)) - width / 2


def both(one: Shape, other: Shape) -> Shape:
    """Where two shapes overlap."""
    return lambda x, y: np.maximum(one(x, y), other(x, y))


def everywhere(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The whole cell."""
    return np.full(np.broadcast(x, y).shape, -1.0)


INK: Colour = (44, 48, 58)
WHITE: Colour = (250, 250, 250)
BODY: Colour = (42, 104, 196)

_floor: Layers = ((everywhere, (206, 197, 180)), (block(0.02, 0.02, 0.98, 0.98, 0.04), (226, 218, 203)))
_ice: Layers = (
    (everywhere, (176, 210, 230)),
    (block(0.02, 0.02, 0.98, 0.98, 0.05), (214, 236, 247)),
    (stroke(0.035, (0.16, 0.38), (0.38, 0.16)), WHITE),
    (stroke(0.035, (0.2, 0.52), (0.3, 0.42)), WHITE),
    (stroke(0.035, (0.62, 0.84), (0.84, 0.62)), WHITE),
)
_bricks: Layers = ((everywhere, (96, 84, 82)),) + tuple(
    (block(left, top, right, top + 0.21, 0.03), (158, 98, 84) if (row + column) % 2 else (146, 88, 76))
    for row, top in enumerate((0.02, 0.27, 0.52, 0.77))
    for column, (left, right) in enumerate(((0.02, 0.48), (0.52, 0.98)) if row % 2 else ((-0.1, 0.23), (0.27, 0.73), (0.77, 1.1)))
)
_target: Layers = (
    (disc(0.5, 0.5, 0.24), (214, 74, 66)),
    (disc(0.5, 0.5, 0.17), WHITE),
    (disc(0.5, 0.5, 0.1), (214, 74, 66)),
)

_spotlight: Layers = ((disc(0.5, 0.5, 0.45), (214, 74, 66)), (disc(0.5, 0.5, 0.39), WHITE), (disc(0.5, 0.5, 0.32), (226, 150, 140)))


def _crate(wood: Colour, plank: Colour, edge: Colour) -> Layers:
    return (
        (block(0.12, 0.12, 0.88, 0.88, 0.06), edge),
        (block(0.16, 0.16, 0.84, 0.84, 0.03), wood),
        (stroke(0.1, (0.24, 0.76), (0.76, 0.24)), plank),
        (ring(block(0.2, 0.2, 0.8, 0.8, 0.02), 0.09), plank),
        (ring(block(0.25, 0.25, 0.75, 0.75, 0.01), 0.02), edge),
    )


def _person(colour: Colour, dx: float = 0.0, dy: float = 0.0, scale: float = 1.0) -> Layers:
    def at(x: float, y: float) -> tuple[float, float]:
        return 0.5 + dx + (x - 0.5) * scale, 0.5 + dy + (y - 0.5) * scale

    body = block(*at(0.3, 0.48), *at(0.7, 0.86), 0.16 * scale)
    head = disc(*at(0.5, 0.32), 0.19 * scale)
    eyes = (disc(*at(0.43, 0.31), 0.03 * scale), disc(*at(0.57, 0.31), 0.03 * scale))
    return (
        (ring(body, 0.05 * scale), INK),
        (body, colour),
        (ring(head, 0.05 * scale), INK),
        (head, (245, 206, 168)),
        *((eye, INK) for eye in eyes),
    )


_hole: Layers = (
    (disc(0.5, 0.52, 0.42, 0.36), (150, 190, 214)),
    (disc(0.5, 0.54, 0.38, 0.31), (18, 52, 92)),
    (both(disc(0.5, 0.54, 0.38, 0.31), disc(0.5, 0.66, 0.38, 0.3)), (30, 78, 128)),
)
_flag: Layers = (
    (disc(0.34, 0.86, 0.16, 0.05), (150, 182, 200)),
    (stroke(0.06, (0.34, 0.16), (0.34, 0.85)), INK),
    (wedge((0.37, 0.16), (0.82, 0.32), (0.37, 0.48)), (44, 160, 90)),
)
_splash: Layers = (
    (disc(0.5, 0.46, 0.16), INK),
    (disc(0.5, 0.46, 0.135), (245, 206, 168)),
    (stroke(0.03, (0.42, 0.42), (0.47, 0.47)), INK),
    (stroke(0.03, (0.47, 0.42), (0.42, 0.47)), INK),
    (stroke(0.03, (0.53, 0.42), (0.58, 0.47)), INK),
    (stroke(0.03, (0.58, 0.42), (0.53, 0.47)), INK),
    (both(disc(0.5, 0.54, 0.38, 0.31), block(0.1, 0.54, 0.9, 0.9)), (30, 78, 128)),
    (stroke(0.03, (0.26, 0.6), (0.36, 0.57), (0.46, 0.61), (0.56, 0.57), (0.66, 0.61), (0.74, 0.58)), (140, 190, 224)),
)


def _machine(lamp: Colour, lever: tuple[float, float]) -> Layers:
    return (
        (everywhere, (62, 56, 84)),
        (block(0.03, 0.03, 0.97, 0.97, 0.06), (80, 72, 108)),
        (stroke(0.06, (0.68, 0.56), (0.84, 0.56), lever), (190, 194, 204)),
        (disc(*lever, 0.08), (226, 60, 60)),
        (block(0.12, 0.14, 0.7, 0.9, 0.08), INK),
        (block(0.15, 0.17, 0.67, 0.87, 0.06), (222, 178, 66)),
        (block(0.2, 0.36, 0.62, 0.62, 0.04), WHITE),
        (stroke(0.05, (0.34, 0.42), (0.46, 0.42), (0.39, 0.57)), (206, 56, 56)),
        (block(0.26, 0.72, 0.56, 0.78, 0.03), INK),
        (disc(0.41, 0.265, 0.06), lamp),
    )


TILES: dict[str, Layers] = {
    "wall": _bricks,
    "floor": _floor,
    "target": _floor + _target,
    "box": _floor + _crate((204, 150, 84), (178, 122, 60), (110, 70, 32)),
    "box on target": _floor + _crate((126, 188, 108), (92, 158, 80), (46, 96, 44)),
    "player": _floor + _person(BODY),
    "player on target": _floor + _spotlight + _person(BODY, scale=0.8),
    "ice": _ice,
    "hole": _ice + _hole,
    "goal": _ice + _flag,
    "player on ice": _ice + _person(BODY),
    "player in hole": _ice + _hole + _splash,
    "player on goal": _ice + _flag + _person((44, 160, 90), dx=0.1, dy=0.12, scale=0.72),
    "arm": _machine((120, 104, 60), (0.84, 0.26)),
    "pulled arm": _machine((255, 246, 170), (0.84, 0.8)),
}


@lru_cache(maxsize=256)
def sprite(name: str, cell: int) -> np.ndarray:
    """The picture of one tile: (cell, cell, 3) uint8, read-only. A name that is not in `TILES` is a `ValueError` that lists them."""
    if name not in TILES:
        raise ValueError(f"unknown tile {name!r}; known: {', '.join(TILES)}")
    if cell < 1:
        raise ValueError(f"a cell is at least one pixel, not {cell}")
    at = (np.arange(cell) + 0.5) / cell
    x, y = at[None, :], at[:, None]
    picture = np.zeros((cell, cell, 3))
    for shape, colour in TILES[name]:
        cover = np.clip(0.5 - shape(x, y) * cell, 0, 1)[:, :, None]
        picture = picture * (1 - cover) + np.array(colour) * cover
    pixels = np.rint(picture).astype(np.uint8)
    pixels.flags.writeable = False
    return pixels

"""Pictures: drawn in code, without a display, the same for the same board (field case R01)."""

import os
import subprocess
import sys

import numpy as np
import pytest

from ragen_envs.bandit import Bandit
from ragen_envs.frozen_lake import FrozenLake
from ragen_envs.sokoban import Sokoban
from ragen_renderers.draw import draw
from ragen_renderers.tiles import TILES, block, both, disc, ring, sprite, stroke, wedge

CHILD = """
import sys
import gymnasium, numpy, ragen_envs, ragen_renderers.draw, ragen_renderers.tiles
for name in ("ragen/Sokoban-v0", "ragen/FrozenLakeNoSlip-v0", "ragen/Bandit-v0"):
    env, twin = (gymnasium.make(name, render_mode="rgb_array", hints=True) for _ in range(2))
    info, _ = env.reset(seed=3)[1], twin.reset(seed=3)
    before = env.render()
    assert before.dtype == numpy.uint8 and before.ndim == 3 and before.shape[2] == 3 and before.min() >= 0, before.shape
    assert before.shape[:2] == tuple(32 * n for n in numpy.shape(info["frames"][-1]))
    assert before.tobytes() == twin.render().tobytes() == env.render().tobytes()
    env.step(info["plan"][0])
    assert env.render().shape == before.shape and (env.render() != before).any()
assert "pygame" not in sys.modules
"""


def test_rendering_needs_no_display_and_no_pygame():
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")}
    child = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr


@pytest.mark.parametrize("world", [Sokoban, FrozenLake, Bandit])
def test_every_tile_of_every_game_is_drawn_and_unlike_the_others(world):
    pictures = [sprite(tile.name, 32).tobytes() for tile in world.tiles]
    assert len(set(pictures)) == len(world.tiles)


def test_each_cell_is_its_tile():
    names = ["ice", "player on ice", "hole"]
    picture = draw([[0, 1, 2], [2, 0, 0]], names, cell=10)
    assert picture.shape == (20, 30, 3) and picture.dtype == np.uint8
    for row, column, name in [(0, 0, "ice"), (0, 1, "player on ice"), (0, 2, "hole"), (1, 0, "hole"), (1, 2, "ice")]:
        np.testing.assert_array_equal(picture[10 * row : 10 * row + 10, 10 * column : 10 * column + 10], sprite(name, 10))


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("cell", [1, 7, 64])
def test_tiles_scale(name, cell):
    picture = sprite(name, cell)
    assert picture.shape == (cell, cell, 3)
    if cell == 64:  # the same picture, only larger
        small = sprite(name, 16).astype(float)
        shrunk = picture.reshape(16, 4, 16, 4, 3).mean(axis=(1, 3))
        assert np.abs(small - shrunk).mean() < 12


@pytest.mark.parametrize(
    ("shape", "x", "y", "distance"),
    [
        (disc(0.5, 0.5, 0.2), 0.5, 0.5, -0.2),
        (disc(0.5, 0.5, 0.2), 0.9, 0.5, 0.2),
        (block(0.2, 0.2, 0.8, 0.4), 0.5, 0.3, -0.1),
        (block(0.2, 0.2, 0.8, 0.4), 1.1, 0.8, 0.5),
        (block(0.2, 0.2, 0.8, 0.8, 0.1), 0.1, 0.5, 0.1),
        (stroke(0.2, (0.0, 0.0), (1.0, 0.0)), 0.5, 0.3, 0.2),
        (stroke(0.2, (0.0, 0.0), (1.0, 0.0)), 1.3, 0.4, 0.4),
        (wedge((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0)), 0.5, 0.25, -0.25),
        (wedge((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0)), 0.5, 1.25, 0.25),
        (ring(disc(0.5, 0.5, 0.2), 0.1), 0.7, 0.5, -0.05),
        (both(disc(0.5, 0.5, 0.2), disc(0.5, 0.5, 0.1)), 0.5, 0.5, -0.1),
    ],
)
def test_distances_to_shapes(shape, x, y, distance):
    assert abs(float(shape(np.array(x), np.array(y))) - distance) < 1e-9


@pytest.mark.parametrize(
    ("board", "names", "cell", "message"),
    [
        ([[0]], ["lava"], 32, "known: wall, floor"),
        ([[1]], ["ice"], 32, "run from 1 to 1"),
        ([[-1]], ["ice"], 32, "-1"),
        ([0, 0], ["ice"], 32, "rows, columns"),
        ([[0.0]], ["ice"], 32, "integers"),
        ([[0]], ["ice"], 0, "at least one pixel"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(board, names, cell, message):
    with pytest.raises(ValueError, match=message):
        draw(board, names, cell)


def test_sprites_cannot_be_spoiled():
    with pytest.raises(ValueError):
        sprite("ice", 8)[0, 0] = 0
    draw([[0]], ["ice"], 8)[:] = 0  # a picture is the caller's own
    assert draw([[0]], ["ice"], 8).any()

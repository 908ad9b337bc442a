"""A board of tile numbers -> a picture."""

from collections.abc import Sequence

import numpy as np

from ragen_renderers.tiles import sprite


def draw(board: np.ndarray | Sequence[Sequence[int]], names: Sequence[str], cell: int = 32) -> np.ndarray:
    """Draw a (rows, columns) board of tile numbers, `names[number]` being a tile of `TILES`.

    Returns (rows * cell, columns * cell, 3) uint8; equal boards give equal bytes. A frame of a record (nested lists) is a board too.
    A number without a name, or a name without a tile, is a `ValueError`.
    """
    numbers = np.asarray(board)
    if numbers.ndim != 2 or not np.issubdtype(numbers.dtype, np.integer):
        raise ValueError(f"a board is a (rows, columns) array of integers, not shape {numbers.shape} of {numbers.dtype}")
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(names):
        raise ValueError(f"tile numbers run from {numbers.min()} to {numbers.max()}, but there are names for 0 to {len(names) - 1}")
    sheet = np.stack([sprite(name, cell) for name in names])  # (tiles, cell, cell, 3)
    rows, columns = numbers.shape
    return sheet[numbers].transpose(0, 2, 1, 3, 4).reshape(rows * cell, columns * cell, 3)

"""Games in words for Gymnasium: importing this package registers the ids of `IDS`."""

from typing import Any

from gymnasium import register

_SOKOBAN, _LAKE, _BANDIT = "ragen_envs.sokoban:Sokoban", "ragen_envs.frozen_lake:FrozenLake", "ragen_envs.bandit:Bandit"

IDS: dict[str, tuple[str, dict[str, Any]]] = {  # id -> (the world's class, the arguments that make the variant)
    "ragen/Sokoban-v0": (_SOKOBAN, {}),
    "ragen/LargerSokoban-v0": (_SOKOBAN, {"size": (8, 8), "boxes": 2, "search_depth": 10}),
    "ragen/SokobanVocab-v0": (_SOKOBAN, {"vocab": "W.GCBA@", "search_depth": 30}),
    "ragen/SokobanCoord-v0": (_SOKOBAN, {"view": "coord"}),
    "ragen/SokobanGridCoord-v0": (_SOKOBAN, {"view": "grid_coord"}),
    "ragen/FrozenLake-v0": (_LAKE, {"frozen": 0.9, "success_rate": 0.8}),
    "ragen/FrozenLakeThird-v0": (_LAKE, {"frozen": 0.8, "success_rate": 1 / 3}),
    "ragen/FrozenLakeNoSlip-v0": (_LAKE, {"frozen": 0.9, "is_slippery": False}),
    "ragen/FrozenLakeCoord-v0": (_LAKE, {"frozen": 0.9, "success_rate": 0.8, "view": "grid_coord"}),
    "ragen/Bandit-v0": (_BANDIT, {}),
    "ragen/BanditRev-v0": (_BANDIT, {"reverse": True}),
    "ragen/BanditTest-v0": (_BANDIT, {"split": "test"}),
    "ragen/BanditRevTest-v0": (_BANDIT, {"split": "test", "reverse": True}),
}

# The worlds count their turns themselves (`turns_per_episode`): a `TimeLimit` could not be told to the player, and marks an
# episode that is solved in its last turn as truncated too.
for _id, (_world, _kwargs) in IDS.items():
    register(_id, entry_point=_world, kwargs=_kwargs)

"""FrozenLake: its dynamics against hand-worked numbers, its maps and its words."""

import gymnasium
import numpy as np
import pytest

import ragen_envs  # noqa: F401  registers the games
from ragen_envs.frozen_lake import FrozenLake, lake_transitions, random_map
from ragen_envs.levels import load, split_of

GYM = "SFFF\nFHFH\nFFFH\nHFFG"  # Gymnasium's standard 4x4 map
LEFT, DOWN, RIGHT, UP = range(4)


def on(level: str, **settings) -> FrozenLake:
    """A lake reset to a given map."""
    env = FrozenLake(**settings)
    env.reset(seed=0, options={"level": level})
    return env


# -- dynamics (field case E05) ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("success_rate", "slippery", "move", "expected"),
    [
        (1 / 3, True, RIGHT, {0: 1 / 3, 1: 1 / 3, 4: 1 / 3}),
        (1 / 3, True, LEFT, {0: 2 / 3, 4: 1 / 3}),
        (0.8, True, RIGHT, {0: 0.1, 1: 0.8, 4: 0.1}),
        (0.8, True, LEFT, {0: 0.9, 4: 0.1}),
        (0.8, False, RIGHT, {1: 1.0}),
        (0.2, False, LEFT, {0: 1.0}),
    ],
)
def test_slip_probabilities_of_the_first_cell(success_rate, slippery, move, expected):
    row = on(GYM, success_rate=success_rate, is_slippery=slippery).transitions()[0, move]
    np.testing.assert_allclose(row, [expected.get(cell, 0.0) for cell in range(16)], rtol=0, atol=1e-12)


@pytest.mark.parametrize("success_rate", [0.0, 1 / 3, 0.8, 1.0])
def test_rows_sum_to_one_and_the_ends_absorb(success_rate):
    table = on(GYM, success_rate=success_rate).transitions()
    np.testing.assert_allclose(table.sum(axis=2), 1.0, rtol=0, atol=1e-12)
    for end in (5, 7, 11, 12, 15):
        assert (table[end, :, end] == 1).all()


def test_the_env_draws_what_the_table_says():
    env = on(GYM, success_rate=1 / 3)
    counts = np.zeros(16, int)
    for _ in range(30_000):
        env.player = (0, 0)
        env._move(RIGHT)
        counts[4 * env.player[0] + env.player[1]] += 1
    assert counts.sum() == counts[[0, 1, 4]].sum() == 30_000
    assert (np.abs(counts[[0, 1, 4]] - 10_000) <= 327).all()


@pytest.mark.parametrize("move", range(4))
def test_a_move_never_goes_back(move):
    env = on("FFFF\nFSFF\nFFFF\nFFFG", success_rate=0.8)
    beside = {LEFT: (1, 0), DOWN: (2, 1), RIGHT: (1, 2), UP: (0, 1)}
    seen = dict.fromkeys(beside.values(), 0)
    for _ in range(4000):
        env.player = (1, 1)
        env._move(move)
        seen[env.player] += 1
    assert seen[beside[(move + 2) % 4]] == 0
    assert abs(seen[beside[move]] - 3200) <= 4 * np.sqrt(4000 * 0.8 * 0.2)
    for side in (1, 3):
        assert abs(seen[beside[(move + side) % 4]] - 400) <= 4 * np.sqrt(4000 * 0.1 * 0.9)


def test_no_slip_ignores_the_success_rate():
    plays = []
    for success_rate in (0.0, 0.5):
        env = on(GYM, success_rate=success_rate, is_slippery=False)
        plays.append([env.step(answer)[:4] for answer in ("Down || Down", "Right || Down || Right", "Right")])
    assert plays[0] == plays[1]
    assert plays[0][-1] == ("_ _ _ _\n_ O _ O\n_ _ _ O\nO _ _ √", 1.0, True, False)


# -- turns, endings, words -------------------------------------------------------------------------------------------------


def test_names_indices_and_directions_agree():  # field case E06
    for name, cell in {"Left": (1, 0), "Down": (2, 1), "Right": (1, 2), "Up": (0, 1)}.items():
        env = on("FFFF\nFSFF\nFFFF\nFFFG", is_slippery=False)
        assert env.step(name)[4]["moves"] == [name] and env.player == cell
    env = FrozenLake()
    info = env.reset(seed=0)[1]
    assert info["actions"] == env.actions == ["Left", "Down", "Right", "Up"]
    assert "Your available actions are: Left, Down, Right, Up." in info["rules"]


def test_endings_and_rewards():
    lake = {"level": "SFF\nHFG\nFFF", "is_slippery": False}
    for answers, reward, terminated, truncated, success in [
        (["Down"], 0.0, True, False, False),  # the hole
        (["Right || Down || Right || Left"], 1.0, True, False, True),  # the goal; nothing is played after it
        (["Up || Up", "Up || Left"], 0.0, False, True, False),  # the budget of four moves
        (["Up || Up", "Right", "Right"], 0.0, False, True, False),  # beside the goal when the budget ends
        (["Up || Right || Down || Right"], 1.0, True, False, True),  # on the goal with the last move
    ]:
        env = on(**lake, moves_per_episode=4)
        for answer in answers:
            _, total, *ends, info = env.step(answer)
        assert (total, *ends, info["success"]) == (reward, terminated, truncated, success), answers


@pytest.mark.parametrize(
    ("settings", "said", "unsaid"),
    [
        ({"success_rate": 0.8}, "as intended with probability 0.8, else to either side (0.1 each)", "not slippery"),
        ({"success_rate": 1 / 3}, "as intended with probability 0.333, else to either side (0.333 each)", "not slippery"),
        ({"success_rate": 1.0}, "The ice is not slippery", "probability"),
        ({"is_slippery": False}, "The ice is not slippery", "probability"),
        ({"view": "grid_coord"}, "from (0, 0) at the top left to (3, 3) at the bottom right", "(5, 5)"),
        ({"view": "coord", "size": 7}, "from (0, 0) at the top left to (6, 6) at the bottom right", "O a hole"),
        ({"vocab": ".GA*!#"}, ". ice, G the goal, A you, * you on the goal, ! you in a hole, # a hole", "√"),
    ],
)
def test_the_rules_speak_of_this_instance(settings, said, unsaid):
    rules = FrozenLake(**settings).reset(seed=1)[1]["rules"]
    assert said in rules and unsaid not in rules


def test_the_coordinate_view_of_a_hand_drawn_map():
    env = FrozenLake(view="coord", is_slippery=False)
    text, _ = env.reset(seed=0, options={"level": "SFF\nHFG\nFFH"})
    assert text == "Board size: 3 rows x 3 columns (zero-indexed).\nGoal: (1, 2)\nPlayer: (0, 0)\nHoles: (1, 0), (2, 2)"
    assert env.step("Down")[0] == "Board size: 3 rows x 3 columns (zero-indexed).\nGoal: (1, 2)\nPlayer in hole: (1, 0)\nHoles: (2, 2)"


@pytest.mark.parametrize("view", ["grid", "compact", "coord", "grid_coord"])
def test_every_observation_is_in_the_space(view):
    env = FrozenLake(view=view, size=5, frozen=0.6, split="val")
    for seed in range(20):
        text, _ = env.reset(seed=seed)
        done = False
        while not done:
            assert text in env.observation_space
            text, _, terminated, truncated, _ = env.step(env.action_space.sample())
            done = terminated or truncated
        assert text in env.observation_space


def test_a_group_shares_its_map_and_not_its_luck():
    env = FrozenLake(success_rate=1 / 3, moves_per_turn=10)
    starts, ends = set(), set()
    for luck in range(16):
        text, info = env.reset(seed=5, options={"luck": luck})
        starts.add((text, info["rules"]))
        ends.add(env.step(" || ".join(["Left", "Up"] * 5))[0])
    assert len(starts) == 1 and len(ends) > 1


# -- maps (field case E07) -------------------------------------------------------------------------------------------------


def test_random_maps_are_maps():
    maps = [random_map(seed, 8, 0.8) for seed in range(50)]
    assert maps == [random_map.__wrapped__(seed, 8, 0.8) for seed in range(50)] and len(set(maps)) >= 45
    for rows in maps:
        cells = "".join(rows)
        assert len(cells) == 64 and cells.count("S") == cells.count("G") == 1
        walk = np.linalg.matrix_power(lake_transitions(rows, 1.0).mean(axis=1), 64)
        assert walk[cells.index("S"), cells.index("G")] > 0  # a path, found by another road than the generator's


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_maps_belong_to_their_split(split):
    env = FrozenLake(split=split)
    for seed in range(30):
        env.reset(seed=seed)
        assert split_of(env.rows) == split


def test_frozen_cells_come_with_their_probability():
    cells = "".join("".join(random_map(seed, 8, 0.9)) for seed in range(200))
    free = cells.count("F") + cells.count("H")
    assert abs(cells.count("F") / free - 0.9) < 0.02  # 0.005 is four sigma; maps without a path are few, and take some holes away


def test_a_pack_deals_its_maps_in_order():
    env = FrozenLake(levels="ragen/lake-p80")
    for seed in (0, 1, 511, 512, 1023):
        text, _ = env.reset(seed=seed)
        assert env.rows == load("ragen/lake-p80")[seed % 512].rows
    assert gymnasium.make("ragen/FrozenLake-v0", levels=["SG\nFF"]).reset(seed=3)[0] == "P G\n_ _"


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"frozen": 0}, {}, "frozen"),
        ({"frozen": 1.5}, {}, "frozen"),
        ({"size": 1}, {}, "size"),
        ({"success_rate": -0.1}, {}, "success_rate"),
        ({"split": "dev"}, {}, "train, val, test"),
        ({"levels": "ragen/lake-p80", "split": "val"}, {}, "not both"),
        ({"levels": "ragen/simple"}, {}, "ragen/lake-p80"),
        ({"size": 2, "frozen": 1e-12, "split": "test"}, {}, "no map"),
        ({}, {"level": "SF\nFF"}, "goal"),
        ({}, {"level": "SG\n\nSG"}, "one level"),
        ({}, {"level": "SFFFG\nFFFFF"}, "larger"),
        ({}, {"map": GYM}, "luck, level"),
    ],
)
def test_what_cannot_be_played_is_an_error(settings, options, message):
    with pytest.raises(ValueError, match=message):
        FrozenLake(**settings).reset(seed=0, options=options)

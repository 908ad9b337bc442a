"""The laws of every registered world: Gymnasium's contract, chance from the seed alone, budgets, and rules that tell the truth."""

import json
import os
import pickle
import random
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.utils.env_checker import check_env

from ragen_envs import IDS

make: Any = gym.make  # whose type hints know neither our worlds nor their settings
make_vec: Any = gym.make_vec
every_id = pytest.mark.parametrize("env_id", IDS)
boards = pytest.mark.parametrize("env_id", [name for name in IDS if "Bandit" not in name])
CHANCE = [name for name in IDS if "Bandit" in name or ("Lake" in name and "NoSlip" not in name)]
HOSTILE = (
    "", " ", "\n", "||", "|| || ||", "|", "\x00", "\u2028", "\ud800", "Up" * 1000, "a||" * 5000, "Ｕｐ", "Uр", "<|im_end|>", "Up, Up",
    "<think>Push it. 🚀\nThen left.</think><answer>Up || Left</answer><|im_end|>", "up || UP || nonsense || Right\n|| 左", "None", "0",
)  # fmt: skip


def transcript(env_id, seed=3, luck=2, steps=50, before_step=lambda: None):
    """All that `steps` turns of random play say, as JSON; an episode that ends is followed by one from `reset()` without a seed."""
    env = make(env_id)
    player = random.Random(env_id)
    said: list = [env.reset(seed=seed, options={"luck": luck})]
    for _ in range(steps):
        before_step()
        actions = said[-1][-1]["actions"]
        said.append(env.step("||".join(player.choice([*actions, "nonsense"]) for _ in range(player.randint(1, 4)))))
        if said[-1][2] or said[-1][3]:
            said.append(env.reset())
    return json.dumps(said)


# -- Gymnasium -------------------------------------------------------------------------------------------------------------


@every_id
def test_gymnasiums_own_check_passes_without_a_warning(env_id):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make(env_id).unwrapped)


@every_id
def test_the_package_can_be_imported_by_make(env_id):
    assert make(f"ragen_envs:{env_id}").reset(seed=1) == make(env_id).reset(seed=1)


@every_id
@pytest.mark.parametrize("seed", [0, 1])
def test_spaces_contain_whatever_is_said_and_heard(env_id, seed):
    env = make(env_id, disable_env_checker=True)
    env.action_space.seed(seed)
    observation, info = env.reset(seed=seed)
    ends = 0
    for step in range(250):
        assert env.observation_space.contains(observation)
        json.dumps(info)
        action = HOSTILE[step % len(HOSTILE)] if step % 5 == 0 else env.action_space.sample()
        assert env.action_space.contains(action)
        observation, reward, terminated, truncated, info = env.step(action)
        assert type(reward) is float and np.isfinite(reward)
        assert not (terminated and truncated)
        assert env.observation_space.contains(observation)
        assert len(info["frames"]) == len(info["moves"]) and info["success"] <= terminated
        if terminated or truncated:
            observation, info = env.reset()
            ends += 1
    assert ends > 10
    assert not env.action_space.contains(3)
    with pytest.raises(TypeError, match="an action is the answer's text"):
        env.step(3)


@every_id
def test_vectors_say_what_single_envs_say(env_id):
    said = []
    for mode in ("sync", "async"):
        envs = make_vec(env_id, num_envs=3, vectorization_mode=mode)
        first, info = envs.reset(seed=[5, 6, 5])
        assert first == tuple(make(env_id).reset(seed=seed)[0] for seed in (5, 6, 5))
        action = info["actions"][0][-1]
        said.append([first, *[envs.step((action, "nonsense", action))[0] for _ in range(4)]])
        assert all(envs.observation_space.contains(observation) for observation in said[-1])
        envs.close()
    assert said[0] == said[1]


# -- chance ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def elsewhere():
    """The transcripts of all ids from two other processes that hash strings differently and build the envs in other orders."""
    program = (
        "import json, sys; from tests.test_envs import transcript\n"
        "print(json.dumps({env_id: transcript(env_id) for env_id in sys.argv[1:]}))"
    )
    here = os.path.dirname(os.path.dirname(__file__))

    def run(hash_seed, ids):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": here}
        return json.loads(subprocess.run([sys.executable, "-c", program, *ids], env=environment, capture_output=True, check=True).stdout)

    return [run("1", list(IDS)), run("2", list(IDS)[::-1])]


@every_id
def test_twins_agree_for_50_turns_anywhere(env_id, elsewhere):
    here = transcript(env_id)
    assert len(json.loads(here)) > 50
    assert [there[env_id] for there in elsewhere] == [here, here]
    with ThreadPoolExecutor(2) as pool:
        assert [thread.result() for thread in [pool.submit(transcript, env_id) for _ in range(2)]] == [here, here]
    other = make(env_id)
    assert transcript(env_id, before_step=lambda: other.reset(seed=9)) == here  # another env played in between
    assert transcript(env_id, seed=4) != here


@every_id
def test_no_global_random_state_is_read_or_written(env_id):
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), pickle.dumps(np.random.get_state())
    first = transcript(env_id, steps=10)
    assert (random.getstate(), pickle.dumps(np.random.get_state())) == before
    random.seed(2)
    np.random.seed(2)
    assert transcript(env_id, steps=10) == first


@every_id
def test_a_group_shares_its_level_and_not_its_luck(env_id):
    env = make(env_id, hints=True)
    differed = 0
    for seed in range(6):
        starts, ends = set(), set()
        for luck in range(30):
            observation, info = env.reset(seed=seed, options={"luck": luck})
            starts.add((observation, info["rules"], tuple(info["actions"])))
            answer = info["plan"] if "Bandit" in env_id else [*info["actions"], info["actions"][0]]
            text, reward, _, _, info = env.step("||".join(answer[: info["allowed"]]))
            ends.add((text, reward, str(info["frames"])))
        assert len(starts) == 1
        differed += len(ends) > 1
    assert differed == (6 if env_id in CHANCE else 0)


@every_id
def test_seeds_and_resets_without_one(env_id):
    env = make(env_id)
    three = [env.reset(seed=11)[0], env.reset()[0], env.reset()[0]]
    assert [env.reset(seed=11)[0], env.reset()[0], env.reset()[0]] == three
    starts = {env.reset(seed=seed)[0] for seed in range(50)}
    if "Bandit" in env_id:
        assert len(starts) >= 12  # of 12 or 8 pairs in two orders
    else:
        assert len(set(three)) == 3 and len(starts) >= 45


WRAPPED = {
    "make": lambda env: env,
    "TimeLimit": lambda env: wrappers.TimeLimit(env, 3),
    "Autoreset": wrappers.Autoreset,
    "RecordEpisodeStatistics": wrappers.RecordEpisodeStatistics,
    "TransformReward": lambda env: wrappers.TransformReward(env, lambda reward: 2 * float(reward)),
    "all of them": lambda env: wrappers.RecordEpisodeStatistics(wrappers.Autoreset(wrappers.TimeLimit(env, 3))),
}


@boards
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_no_wrapper_swallows_the_seed_or_the_luck(env_id, wrapper):
    def start(seed, luck):
        observation, info = WRAPPED[wrapper](make(env_id)).reset(seed=seed, options={"luck": luck})
        assert (info["seed"], info["luck"]) == (seed, luck)
        return observation

    assert {start(5, luck) for luck in range(8)} == {make(env_id).unwrapped.reset(seed=5)[0]}
    assert len({start(seed, 0) for seed in range(8)}) >= 7


@boards
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_vector_swallows_the_seed(env_id, mode):
    envs = make_vec(env_id, num_envs=8, vectorization_mode=mode)
    assert len(set(envs.reset(seed=[5] * 8)[0])) == 1
    assert len(set(envs.reset(seed=list(range(8)))[0])) >= 7
    assert envs.reset(seed=7)[0] == tuple(make(env_id).reset(seed=seed)[0] for seed in range(7, 15))
    envs.close()


@every_id
def test_a_pickled_env_plays_on_as_the_other(env_id):
    env = make(env_id)
    _, info = env.reset(seed=8, options={"luck": 3})
    if "Bandit" not in env_id:
        env.step(info["actions"][1])
    twin = pickle.loads(pickle.dumps(env))
    for _ in range(3):
        assert env.step(info["actions"][0]) == twin.step(info["actions"][0])
    assert env.reset() == twin.reset()


# -- turns and budgets -----------------------------------------------------------------------------------------------------


@every_id
@pytest.mark.parametrize("penalty", [-0.1, -0.25])
def test_a_malformed_turn_costs_the_penalty_once(env_id, penalty):
    env = make(env_id, format_penalty=penalty)
    for bad in ("", "nonsense", "nonsense || more || of it", " || ", "\ud800🚀"):
        before = env.reset(seed=2)
        after, reward, terminated, _, info = env.step(bad)
        assert reward == pytest.approx(penalty, abs=1e-9) and not terminated
        assert (info["valid"], info["moves"], info["effective"], info["frames"]) == (False, [], False, [])
        assert after == before[0] and info["left"] == before[1]["left"]


@every_id
def test_unknown_parts_are_dropped_and_the_rest_is_played(env_id):
    clean, mixed = make(env_id), make(env_id)
    actions = clean.reset(seed=2)[1]["actions"]
    mixed.reset(seed=2)
    _, reward, *_, one = clean.step(actions[0])
    text, penalised, *_, two = mixed.step(f"nonsense || {actions[0].upper()} || \n || more")
    assert one["valid"] and not two["valid"] and one["moves"] == two["moves"] == [actions[0]]
    assert penalised == pytest.approx(reward - 0.1, abs=1e-9)
    assert one["frames"] == two["frames"] and text


@every_id
@pytest.mark.parametrize("write", [str.lower, str.upper, lambda name: f" \t{name}\n", lambda name: f"{name.swapcase()} ||"])
def test_moves_are_known_whatever_their_case_and_the_space_around_them(env_id, write):
    env = make(env_id)
    for number, name in enumerate(env.reset(seed=2)[1]["actions"]):
        env.reset(seed=2)
        info = env.step(write(name))[4]
        assert info["valid"] and info["moves"] == [env.get_wrapper_attr("actions")[number]]


CORRIDORS = {"Sokoban": "########\n#@ $  .#\n########", "Lake": "SFFF\nFFFF\nFFFF\nFFFG"}


def corridor(env_id, **settings):
    """An env that plays a level in which Left changes nothing for as long as you like."""
    env = make(env_id, **settings, levels=[CORRIDORS["Lake" if "Lake" in env_id else "Sokoban"]])
    return env, env.reset(seed=0)[1]


@boards
def test_both_budgets_of_moves_hold(env_id):
    env, info = corridor(env_id, moves_per_turn=3, moves_per_episode=5)
    assert (info["left"], info["allowed"]) == (5, 3)
    _, reward, _, truncated, info = env.step("Left || Left || Left || Left")
    assert (info["moves"], info["valid"], info["left"], info["allowed"], truncated) == (["Left"] * 3, False, 2, 2, False)
    price = -0.1 * ("Sokoban" in env_id)
    assert reward == pytest.approx(3 * price - 0.1, abs=1e-9)
    _, reward, terminated, truncated, info = env.step("Left || Left || Left")
    assert (info["moves"], info["valid"], info["left"], info["allowed"]) == (["Left"] * 2, False, 0, 0)
    assert (terminated, truncated, info["success"]) == (False, True, False)


@boards
def test_the_budget_of_turns_holds_and_counts_malformed_turns(env_id):
    env, _ = corridor(env_id, turns_per_episode=3)
    assert [env.step(action)[2:4] for action in ("Left", "nonsense", "Left")] == [(False, False), (False, False), (False, True)]
    env, _ = corridor(env_id, turns_per_episode=None, moves_per_episode=12)
    assert [env.step("Left")[3] for _ in range(12)] == [False] * 11 + [True]


@boards
def test_an_episode_solved_in_its_last_turn_is_not_truncated(env_id):
    level = "#####\n#@$.#\n#####" if "Sokoban" in env_id else "SG\nFF"
    for budgets in ({"turns_per_episode": 1}, {"moves_per_episode": 1}):
        for luck in range(20):
            env = make(env_id, levels=[level], **budgets)
            env.reset(seed=0, options={"luck": luck})
            _, reward, terminated, truncated, info = env.step("Right")
            if info["success"]:
                break
        assert (terminated, truncated, info["success"]) == (True, False, True)
        assert reward == pytest.approx(10.9 if "Sokoban" in env_id else 1, abs=1e-9)


# -- words -----------------------------------------------------------------------------------------------------------------


@every_id
def test_the_rules_tell_the_budgets_and_moves_of_this_very_env(env_id):
    own = ["up to 5 actions in a turn", "up to 10 in all", "within 5 turns"]
    if "Bandit" in env_id:
        own = ["up to 1 action in a turn", "up to 1 in all", "within 1 turn"]
    other = {"moves_per_turn": 3, "moves_per_episode": 17, "turns_per_episode": 7}
    for settings, words in (({}, own), (other, ["up to 3 actions in a turn", "up to 17 in all", "within 7 turns"])):
        _, info = make(env_id, **settings).reset(seed=1)
        assert all(part in info["rules"] for part in words)
        assert f"Your available actions are: {', '.join(info['actions'])}." in info["rules"]
    assert "turns" not in make(env_id, turns_per_episode=None).reset(seed=1)[1]["rules"].splitlines()[-1]


@boards
def test_the_legend_and_the_bounds_are_those_of_this_very_env(env_id):
    world = make(env_id).unwrapped
    symbols = "qwertzu"[: len(world.tiles)]
    board, info = make(env_id, vocab=symbols, view="grid").reset(seed=1)
    for symbol, tile in zip(symbols, world.tiles, strict=True):
        assert f"{symbol} {tile.meaning}" in info["rules"]
    assert set(board) <= set(symbols) | set(" \n")
    size = 7 if "Lake" in env_id else (5, 7)
    for view in ("coord", "grid_coord"):
        text, info = make(env_id, size=size, view=view).reset(seed=1)
        rows = 7 if "Lake" in env_id else 5
        assert f"({rows - 1}, 6)" in info["rules"] and f"Board size: {rows} rows x 7 columns" in text
        assert ("The meaning of each symbol" in info["rules"]) == (view == "grid_coord")
    assert "Coordinates" not in make(env_id, view="grid").reset(seed=1)[1]["rules"]


@boards
def test_a_cell_is_one_word_unless_asked_otherwise(env_id):
    spaced, info = make(env_id, view="grid").reset(seed=1)
    compact = make(env_id, view="compact").reset(seed=1)[0]
    assert spaced.replace(" ", "") == compact
    assert [len(line.split()) for line in spaced.splitlines()] == [len(row) for row in info["frames"][0]]


@every_id
def test_unknown_settings_and_options_are_errors_that_name_the_known_ones(env_id):
    with pytest.raises(TypeError, match="speling"):
        make(env_id, speling=1)
    with pytest.raises(ValueError, match="unknown view 'pixels'; known: grid, compact, coord, grid_coord"):
        make(env_id, view="pixels")
    with pytest.raises(ValueError, match="known: train, val, test"):
        make(env_id, **{"reverse": False} if "Bandit" in env_id else {}, split="dev")
    env = make(env_id)
    with pytest.raises(ValueError, match="unknown reset option 'lukc'; known: luck, level"):
        env.reset(seed=1, options={"lukc": 3})
    for luck in (-1, 1.5, "3", True):
        with pytest.raises(ValueError, match="luck is an integer >= 0"):
            env.reset(seed=1, options={"luck": luck})
    with pytest.raises(ValueError, match="level"):
        env.reset(seed=1, options={"level": 3})
    for budget in ("moves_per_turn", "moves_per_episode", "turns_per_episode"):
        with pytest.raises(ValueError, match=f"{budget} is at least 1"):
            make(env_id, **{budget: 0})


@every_id
def test_the_exact_player_is_shown_on_request_only(env_id):
    assert "plan" not in make(env_id).reset(seed=1)[1]
    env = make(env_id, hints=True)
    _, info = env.reset(seed=1)
    ended = False
    while not ended:
        assert info["plan"] and set(info["plan"]) <= set(info["actions"])
        _, _, terminated, truncated, info = env.step("||".join(info["plan"][: info["allowed"]]))
        assert info["valid"]
        ended = terminated or truncated
    assert info["plan"] == []


@every_id
def test_the_state_key_tells_states_of_a_level_apart(env_id):
    """Equal keys where the boards are equal, and only there; a list of integers, so that it survives JSON."""
    env, seen, boards = make(env_id), {}, set()
    rng = np.random.default_rng(0)
    for luck in range(4):
        _, info = env.reset(seed=3, options={"luck": luck})
        over = False
        while not over:
            board = str(info["frames"][-1])
            assert all(type(number) is int for number in info["state"])
            assert seen.setdefault(tuple(info["state"]), board) == board
            boards.add(board)
            _, _, terminated, truncated, info = env.step(str(rng.choice(info["actions"])))
            over = terminated or truncated
    assert len(seen) == len(boards) > 1 or "Bandit" in env_id

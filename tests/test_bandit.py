"""The bandit: who pays what, what success is, and what a group shares."""

import re

import gymnasium
import numpy as np
import pytest

import ragen_envs  # noqa: F401  registers the games
from ragen_envs.bandit import PAIRS, Bandit
from ragen_envs.solvers import better_arm

NAMES = ("Phoenix", "Dragon")


def test_names_are_in_one_split_and_once():
    names = [name for pairs in PAIRS.values() for pair in pairs for name in pair]
    assert len({name.lower() for name in names}) == len(names) == 2 * (12 + 4 + 8)
    assert {split: len(pairs) for split, pairs in PAIRS.items()} == {"train": 12, "val": 4, "test": 8}


@pytest.mark.parametrize("split", PAIRS)
def test_the_seed_draws_every_pair_in_a_fair_order(split):
    env, seen, first_is_low = Bandit(split=split), dict.fromkeys(PAIRS[split], 0), 0
    for seed in range(2000):
        one, other = env.reset(seed=seed)[1]["actions"]
        pair = (one, other) if (one, other) in seen else (other, one)
        seen[pair] += 1
        first_is_low += pair == (one, other)
    expected = 2000 / len(seen)
    assert abs(first_is_low - 1000) < 4 * np.sqrt(2000 / 4)
    assert all(abs(count - expected) < 4 * np.sqrt(expected) for count in seen.values())


@pytest.mark.parametrize(
    ("reverse", "arm", "mean", "deviation", "payoffs"),
    [
        (False, "Phoenix", 0.1, 0.0, {0.1}),
        (False, "Dragon", 0.25, 0.4330127, {0.0, 1.0}),
        (True, "Phoenix", 0.25, 0.4330127, {0.0, 1.0}),
        (True, "Dragon", 0.1, 0.0, {0.1}),
    ],
)
def test_payoffs_over_many_lucks(reverse, arm, mean, deviation, payoffs):
    env, rewards = Bandit(reverse=reverse, names=NAMES), []
    for luck in range(2000):
        env.reset(seed=7, options={"luck": luck})
        text, reward, terminated, truncated, info = env.step(arm.upper())
        assert terminated and info["valid"] and info["moves"] == [arm] and text == f"{arm}: {reward} points"
        rewards.append(reward)
    assert set(rewards) == payoffs
    assert abs(np.mean(rewards) - mean) <= 4 * deviation / np.sqrt(2000) + 1e-9


@pytest.mark.parametrize(("reverse", "high"), [(False, "Dragon"), (True, "Phoenix")])
def test_success_is_the_choice_and_not_the_payoff(reverse, high):
    env, outcomes = Bandit(reverse=reverse, names=NAMES), set()
    for luck in range(40):
        for arm in NAMES:
            env.reset(seed=luck, options={"luck": luck})
            assert env.plan() == [high]
            _, reward, *_, info = env.step(arm)
            assert info["success"] == (arm == high)
            outcomes.add((arm == high, reward))
    assert outcomes == {(True, 0.0), (True, 1.0), (False, 0.1)}


def test_a_group_shares_names_and_order_and_not_the_payoff():
    env = Bandit()
    for seed in range(20):
        starts, ends = set(), set()
        for luck in range(32):
            text, info = env.reset(seed=seed, options={"luck": luck})
            starts.add((text, info["rules"]))
            ends.add(env.step(env.plan()[0])[1])
        assert len(starts) == 1 and ends == {0.0, 1.0}


def test_the_words_name_both_arms_and_no_payoff():
    for split in PAIRS:
        env = Bandit(split=split)
        for seed in range(30):
            text, info = env.reset(seed=seed)
            one, other = info["actions"]
            assert text == f"Choose between two arms: {one} and {other}."
            assert f"Your available actions are: {one}, {other}." in info["rules"] and "within 1 turn." in info["rules"]
            assert not re.search(r"0\.1|0\.25|symbol", info["rules"])
            assert text in env.observation_space
            assert env.step(one)[0] in env.observation_space
            assert env.frame() == [[1, 0]]


@pytest.mark.parametrize("answer", ["", "Griffin", "Phoenix Dragon", "Phoenix || Dragon"])
def test_a_malformed_answer_is_penalised_once(answer):
    env = Bandit(names=NAMES)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(answer)
    played = answer == "Phoenix || Dragon"  # more moves than allowed: the first is played
    assert not info["valid"] and terminated == played and truncated == (not played)
    assert abs(reward - (0.1 * played - 0.1)) < 1e-12


def test_sampled_answers_name_arms_of_the_split():
    env = Bandit(split="val")
    env.action_space.seed(0)
    assert {env.action_space.sample() for _ in range(400)} == {name for pair in PAIRS["val"] for name in pair}


def test_reversed_twins_share_everything_but_the_payoffs():
    plain, twin = gymnasium.make("ragen/Bandit-v0", hints=True), gymnasium.make("ragen/BanditRev-v0", hints=True)
    for seed in range(20):
        (text, info), (twin_text, twin_info) = plain.reset(seed=seed), twin.reset(seed=seed)
        assert (text, info["actions"], info["rules"]) == (twin_text, twin_info["actions"], twin_info["rules"])
        assert {*info["plan"], *twin_info["plan"]} == set(info["actions"])


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"split": "dev"}, {}, "train, val, test"),
        ({"names": ("Phoenix",)}, {}, "low, high"),
        ({"names": ("Phoenix", "phoenix")}, {}, "different"),
        ({"names": ("A || B", "C")}, {}, "different"),
        ({"names": "ab"}, {}, "different"),
        ({"names": ("A", "B"), "split": "test"}, {}, "not both"),
        ({}, {"level": "Phoenix Dragon"}, "names="),
    ],
)
def test_what_cannot_be_played_is_an_error(settings, options, message):
    with pytest.raises(ValueError, match=message):
        Bandit(**settings).reset(seed=0, options=options)


def test_the_better_arm_has_the_greater_mean():
    assert better_arm([[(1.0, 0.1)], [(0.25, 1.0), (0.75, 0.0)]]) == 1
    assert better_arm([[(1.0, 0.3)], [(0.25, 1.0), (0.75, 0.0)]]) == 0

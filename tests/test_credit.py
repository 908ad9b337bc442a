"""The credit lab: the exact side by hand, by finite differences and against play; the estimators' known laws."""

import numpy as np
import pytest
import torch

from benchmarks import credit, credit_page
from benchmarks import tabular as tab
from ragen_agent.algos import ALGOS

HALF = np.full((1, 3, 2), 0.5)
CLOSE = {"atol": 1e-6, "rtol": 0}


def chain(horizon=2):
    """Cells 0 and 1 and the goal 2: move 1 goes right, move 0 stays; arriving pays 1."""
    transitions = np.zeros((1, 3, 2, 3))
    for s in range(3):
        transitions[0, s, 0, s] = 1.0
        transitions[0, s, 1, min(s + 1, 2)] = 1.0
    rewards = np.zeros_like(transitions)
    rewards[0, 1, 1, 2] = 1.0
    return tab.World("chain", transitions, rewards, np.array([[False, False, True]]), np.array([0]), horizon)


def test_the_chain_by_hand():
    """Uniform: V(1, s1) = 1/2; V(2, s0) = 1/4 (right, right), V(2, s1) = 3/4; with two moves left, A(s0, right) = 1/2 - 1/4."""
    exact = tab.solve(chain(), HALF)
    np.testing.assert_allclose(exact.value[0], [[0, 0, 0], [0, 0.5, 0], [0.25, 0.75, 0]], **CLOSE)
    np.testing.assert_allclose(exact.advantage[0, 2, 0], [-0.25, 0.25], **CLOSE)
    np.testing.assert_allclose(exact.advantage[0, 1, 1], [-0.5, 0.5], **CLOSE)
    np.testing.assert_allclose(exact.occupancy[0, 2], [1, 0, 0], **CLOSE)
    np.testing.assert_allclose(exact.occupancy[0, 1], [0.5, 0.5, 0], **CLOSE)
    np.testing.assert_allclose(exact.gradient[0, 0], [-0.125, 0.125], **CLOSE)  # d(h=2, s0) pi A = 1 * .5 * .25
    np.testing.assert_allclose(exact.gradient[0, 1], [-0.125, 0.125], **CLOSE)  # .5 * .5 * .5


@pytest.mark.parametrize("world", [chain(3), tab.lake(2), tab.bandit(2)], ids=lambda world: world.name)
def test_the_gradient_is_that_of_the_mean_return(world):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=world.transitions.shape[:3])

    def value(x):
        exact = tab.solve(world, tab.softmax(x))
        return exact.value[np.arange(len(world.start)), world.horizon, world.start].mean()

    exact = tab.solve(world, tab.softmax(logits))
    for _ in range(8):
        way = rng.normal(size=logits.shape)
        slope = (value(logits + 1e-5 * way) - value(logits - 1e-5 * way)) / 2e-5
        assert slope == pytest.approx((exact.gradient * way).sum(), abs=1e-7)


@pytest.mark.parametrize("world", [chain(4), tab.lake(4), tab.bandit(4)], ids=lambda world: world.name)
def test_play_earns_what_the_table_says(world):
    policy = tab.softmax(3 * tab.optimal(world))
    exact = tab.solve(world, policy)
    episodes = tab.play(world, policy, 4000, np.random.default_rng(1))
    for level, start in enumerate(world.start):
        scores = episodes.reward[episodes.level == level].sum(1)
        assert abs(scores.mean() - exact.value[level, world.horizon, start]) < 4.5 * scores.std() / len(scores) ** 0.5 + 1e-9
    assert not episodes.reward[~episodes.played].any()


def test_the_lake_is_the_suites_own_lake():
    import gymnasium as gym

    world = tab.lake(3)
    for seed in range(3):
        env = gym.make("ragen/FrozenLake-v0")
        env.reset(seed=seed)
        np.testing.assert_array_equal(env.unwrapped.transitions(), world.transitions[seed])
        row, column = env.unwrapped.player
        assert world.start[seed] == row * 4 + column


def measured(world, policy, batches=200, size=8, **made):
    config = credit.Credit(levels=len(world.start), size=size, batches=batches)
    found = credit.measure(world, policy, config, made)
    exact = tab.solve(world, policy)
    return {name: credit.intervals(tally, exact) for name, tally in found.items()}


def test_with_the_exact_critic_and_lambda_0_a_world_without_chance_shows_its_advantages_exactly():
    world = chain(3)
    told = measured(world, HALF, PPO=credit.Estimator("PPO", {"whiten": False, "lam": 0.0}, "exact"))["PPO"]
    for name, value in {"bias": 0, "std": 0, "correlation": 1, "scaled_bias": 0, "scaled_std": 0, "gradient_cosine": 1}.items():
        assert told[name][0] == pytest.approx(value, abs=2e-6 if "std" in name or "bias" in name else 1e-2), name


def test_known_biases_on_the_bandit():
    """ARPO's bias is the value it lacks; leave-one-out has none; the mean of n takes its own share 1/n off (Dr. GRPO)."""
    world, policy = tab.bandit(2), np.full((2, 2, 2), 0.5)
    names = {name: credit.Estimator(name) for name in ("ARPO", "DrGRPO", "RLOO")}
    told = measured(world, policy, batches=2000, size=2, **names)
    assert told["ARPO"]["bias"][1] < 0.175 < told["ARPO"]["bias"][2] + 0.002
    assert told["RLOO"]["bias"][1] == 0 and told["RLOO"]["scaled_bias"][1] == 0
    assert told["DrGRPO"]["bias"][1] < 0.075 / 2 < told["DrGRPO"]["bias"][2] + 0.002  # A = +-.075, halved
    for name in names:
        assert told[name]["gradient_cosine"][1] < 1.0 < told[name]["gradient_cosine"][2] + 0.01, name


def test_an_estimator_that_knows_nothing_shows_it():
    """Advantages drawn at random correlate with nothing, and their gradient points nowhere."""
    world, policy, rng = tab.lake(2), np.full((2, 16, 4), 0.25), np.random.default_rng(0)
    exact, rows = tab.solve(world, policy), []
    for _ in range(200):
        episodes = tab.play(world, policy, 8, rng)
        kind, shape = credit.kinds(episodes, world)
        given = np.where(episodes.played, rng.normal(size=kind.shape), 0.0)
        rows.append((*credit._sums(given, kind, episodes.played, shape), credit._gradient(given, episodes, policy)))
    told = credit.intervals(credit.Tally(*(np.stack(column) for column in zip(*rows, strict=True))), exact)
    assert abs(told["correlation"][0]) < 0.02 and abs(told["batch_cosine"][0]) < 0.05


def test_every_estimator_of_the_table_is_there_and_judges():
    world, policy = tab.lake(2), np.full((2, 16, 4), 0.25)
    assert {e.algo for e in credit.ESTIMATORS.values()} <= set(ALGOS)
    told = measured(world, policy, batches=40, size=4, **credit.ESTIMATORS)
    for name, row in told.items():
        assert all(np.isfinite(value).all() for value in row.values()), name
        assert row["batch_cosine"][0] > 0.1, name


def test_the_page_keeps_its_words_and_shows_every_number(tmp_path):
    scenes = {"A, b": {"value": 0.25, "estimators": {"X": {name: [0.5, 0.4, 0.6] for name in credit_page.COLUMNS}}}}
    page = tmp_path / "credit.md"
    page.write_text(f"before\n{credit_page.BEGIN}\nold\n{credit_page.END}\nafter\n")
    credit_page.write(scenes, tmp_path)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert text.count("0.500 (0.400, 0.600)") == len(credit_page.COLUMNS) and (tmp_path / "figures/credit.png").stat().st_size > 5000
    page.write_text("no markers")
    with pytest.raises(ValueError, match="markers"):
        credit_page.write(scenes, tmp_path)


def test_numbers_do_not_depend_on_torchs_random_state():
    world, policy = tab.bandit(2), np.full((2, 2, 2), 0.5)
    torch.manual_seed(1)
    one = measured(world, policy, batches=40, ARPO=credit.Estimator("ARPO"))
    torch.manual_seed(2)
    assert one == measured(world, policy, batches=40, ARPO=credit.Estimator("ARPO"))

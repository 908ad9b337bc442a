"""The table of optimizers: what sets any two of them apart, what each is set to, and what they have in common."""

import copy
import inspect
from itertools import combinations

import pytest
import torch
from torch import Tensor, tensor

from ragen_agent.algos import (
    ALGOS,
    ARPO,
    BRPO,
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    MTGRPO,
    RLOO,
    DrGRPO,
    GiGPO,
    GSPOToken,
    Normalised,
    ReBN,
    ReinforcePP,
    ReinforcePPBaseline,
    StarPO,
    find,
)
from ragen_agent.algos.settings import Settings
from ragen_agent.algos.starpo import written
from ragen_agent.batch import Batch
from tests.algo_parts import algo, moved, policy
from tests.parts import BigramLM
from tests.table_parts import GROUPS, PAID, ROWS, STATES, by_turns, game, policy_gradient, rich

EACH = pytest.mark.parametrize("kind", ALGOS.values(), ids=ALGOS)
GROUPED = (GRPO, DrGRPO, RLOO, DAPO, GSPO, GSPOToken, CISPO, GiGPO, MTGRPO, Normalised)  # the group is the baseline

# ---- what sets two apart ----


def signature(kind: type[StarPO]) -> tuple:
    """All that a preset does: its settings, how often it plays again, and whose code each of its methods is."""
    methods = {name: value.__qualname__ for name, value in inspect.getmembers(kind, inspect.isfunction)}
    return (
        sorted(kind.settings().items(), key=str),
        kind.refill,
        sorted((n, q) for n, q in methods.items() if n in {*vars(StarPO), *vars(Settings)}),
    )


def test_no_two_presets_resolve_to_the_same():
    for one, two in combinations(ALGOS.values(), 2):
        assert signature(one) != signature(two), f"{one.__name__} and {two.__name__} are the same optimizer"


def test_a_preset_that_only_renames_another_is_found_out():
    class Renamed(GRPO):
        """GRPO by another name."""

        clip_high: float = 0.28
        """As before."""

    class Other(GRPO):
        """GRPO with another clip."""

        clip_high: float = 0.2
        """Not as before."""

    class Own(GRPO):
        """GRPO with code of its own."""

        def surrogate(self, new, batch):
            """As before, but who knows."""
            return super().surrogate(new, batch)

    assert signature(Renamed) == signature(GRPO)
    assert len({str(signature(kind)) for kind in (GRPO, Other, Own)}) == 3


SAME = {frozenset(("GSPO", "GSPOToken"))}  # with advantages equal within an episode: the law of arXiv 2507.18071, section 4.3


def test_any_two_presets_pull_differently_on_one_rich_batch():
    pulls: dict[str, Tensor] = {}
    for name, kind in ALGOS.items():
        agent, data = algo(kind, {}), rich()
        agent.prepare(data)
        moved(agent)
        pulls[name] = policy_gradient(agent, data)
        assert pulls[name].abs().max() > 1e-3, name
    for one, two in combinations(pulls, 2):
        gap = float((pulls[one] - pulls[two]).abs().max())
        assert gap < 1e-7 if frozenset((one, two)) in SAME else gap > 1e-4, f"{one} and {two} differ by {gap}"


@pytest.mark.parametrize("kind", [GSPO, GSPOToken])
def test_gspo_averages_what_its_token_form_keeps(kind):
    """Credit of 1 for the first token and 3 for the second: GSPO has one ratio for both, so it takes their mean."""

    class ByTurn(kind):
        def advantage(self, batch):
            return 1.0 + 2 * batch.turn.float()

    data = game([(0, ".0.1")], [[0, 1]], [0])
    ByTurn(policy()).prepare(data)
    assert written(data, "advantage")[data.sampled].tolist() == ([2, 2] if kind is GSPO else [1, 3])


@EACH
def test_the_name_and_the_documentation_are_there(kind):
    assert find(kind.__name__) is kind
    told = inspect.getdoc(kind) or ""
    assert kind in (ARPO, BRPO) or "arXiv" in told


def test_find_lists_all():
    with pytest.raises(ValueError, match="unknown algo") as error:
        find("grpo")
    assert all(name in str(error.value) for name in ALGOS) and len(ALGOS) == 16


PRESETS = [
    (GRPO, {"aggregation": "seq-mean-token-mean", "std": True}),
    (DrGRPO, {"aggregation": "seq-mean-token-sum", "std": False}),
    (RLOO, {"aggregation": "seq-mean-token-sum", "kl_in": "reward"}),
    (DAPO, {"aggregation": "token-mean", "clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.0, "overlong_length": None}),
    (GSPO, {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"}),
    (GSPOToken, {"ratio": "sequence-token", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"}),
    (CISPO, {"ratio": "token", "clip_low": 1.0, "aggregation": "token-mean"}),
    (GiGPO, {"omega": 1.0, "gamma": 0.95, "std": True}),
    (MTGRPO, {"lam": 1.0, "std": True}),
    (ReinforcePP, {"kl_in": "reward", "clip_low": 0.2, "clip_high": 0.2, "gamma": 1.0}),
    (ReinforcePPBaseline, {"kl_in": "loss", "kl_kind": "k2", "clip_low": 0.2, "clip_high": 0.2}),
    (ReBN, {"gamma": 0.9}),
]


@pytest.mark.parametrize(("kind", "wanted"), PRESETS, ids=[kind.__name__ for kind, _ in PRESETS])
def test_presets_are_those_of_the_papers(kind, wanted):
    assert {name: kind.settings()[name] for name in wanted} == wanted


def test_only_dapo_plays_again():
    assert {name for name, kind in ALGOS.items() if kind.refill} == {"DAPO"} and DAPO.refill == 10


@pytest.mark.parametrize(
    ("kind", "bad", "told"),
    [
        (Normalised, {"grouping": "level"}, "state, batch, env"),
        (Normalised, {"method": "std"}, "identity, mean, mean_std, asym_clip"),
        (DAPO, {"overlong_length": 9}, "together"),
        (DAPO, {"overlong_cache": 9}, "together"),
        (DAPO, {"overlong_length": 4, "overlong_cache": 5}, "above overlong_length"),
        (DAPO, {"overlong_length": 4, "overlong_cache": 0}, "above 0"),
        (GiGPO, {"gamma": 1.5}, "from 0 to 1"),
        (GiGPO, {"omega": -1}, "at least 0"),
        (MTGRPO, {"lam": -0.5}, "at least 0"),
        (ReBN, {"gamma": -0.1}, "from 0 to 1"),
        (ReinforcePP, {"gamma": 2}, "from 0 to 1"),
    ],
)
def test_bad_settings(kind, bad, told):
    with pytest.raises(ValueError, match=told):
        kind(policy(), **bad)


# ---- what they have in common ----


def permuted(data: Batch, order: Tensor) -> Batch:
    """The same episodes numbered anew, `order` (E,) being old numbers, in rows the other way round, and groups by other names."""
    other = copy.copy(data).rows(torch.arange(len(data)).flip(0))
    other.episode = order.argsort()[other.episode]
    for name in ("group", "score", "truncated", "world"):
        setattr(other, name, vars(data)[name][order])
    other.group = 5 - other.group
    return other


@EACH
def test_the_numbering_of_episodes_and_groups_does_not_matter(kind):
    data, order = rich(), tensor([3, 8, 1, 0, 9, 5, 2, 4, 7, 6])
    agent, other = algo(kind, {}), permuted(rich(), order)
    agent.prepare(data)
    agent.prepare(other)
    torch.testing.assert_close(written(other, "advantage").flip(0), written(data, "advantage"), atol=1e-5, rtol=0)


@EACH
@pytest.mark.parametrize("extra", [{}, {"kl_coef": 0.1, "kl_in": "reward"}, {"reweight": True}])
def test_an_episode_of_many_rows_counts_once(kind, extra):
    """The rows of rich() joined, under a policy that reads one token back."""
    joined = {e: "".join(pattern for episode, pattern in ROWS if episode == e) for e, _ in ROWS}
    cut, one = game(ROWS, PAID, GROUPS, STATES), game(list(joined.items()), PAID, GROUPS, STATES)
    found = []
    for data in (cut, one):
        data.ids = torch.where(data.episode[:, None] % 2 == 0, 2, torch.ones_like(data.ids))
        model, reference = BigramLM.of(torch.eye(3)).double(), BigramLM.of(torch.ones(3, 3).tril()).double()
        agent = kind(model, reference=reference, **extra)
        agent.prepare(data)
        moved(agent)
        found.append((written(data, "advantage")[data.sampled].tolist(), policy_gradient(agent, data)))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-6, rtol=0)
    assert found[0][1].abs().max() > 1e-3


@pytest.mark.parametrize("kind", GROUPED, ids=lambda kind: kind.__name__)
def test_flat_groups_and_groups_of_one_give_exactly_0(kind):
    """A ragged batch: three and five episodes, one alone, and a flat group whose returns differ by rounding."""
    paid = [[1.0], [0.0], [0.5], [2.0], [0.0], [0.0], [1.0], [1.0], [7.0], [0.3000001], [0.3], [0.3]]
    groups = [0] * 3 + [1] * 5 + [2] + [3] * 3
    data = game([(i, ".0" + "0" * (i % 3)) for i in range(12)], paid, groups, [[g] for g in groups])
    found = [turns[0] for turns in by_turns(kind(policy()), data)]
    assert found[8:] == [0, 0, 0, 0]
    assert found[0] > 0 > found[1] and abs(found[2]) < 1e-6 and found[3] > found[6] > 0 > found[4]
    assert found[4] == pytest.approx(found[5], abs=1e-6) and found[6] == pytest.approx(found[7], abs=1e-6)
    assert sum(found[:3]) == pytest.approx(0, abs=1e-6) and sum(found[3:8]) == pytest.approx(0, abs=1e-5)


@EACH
def test_a_flat_batch_teaches_nothing(kind):
    data = game([(i, ".0" + "0" * i) for i in range(4)], [[1]] * 4, [0, 0, 1, 1], [[0], [0], [1], [1]])
    agent = kind(policy())
    agent.prepare(data)
    assert bool(written(data, "advantage").any()) is (kind is ARPO)


@EACH
def test_soft_reweighting_by_the_spread_of_the_group(kind):
    """RAGEN: A *= std_group / (max std + 1e-6). The third group of rich() spreads most."""
    plain, soft = rich(), rich()
    algo(kind, {}).prepare(plain)
    algo(kind, {"reweight": True}).prepare(soft)
    scores = [tensor([sum(turns) for turns, group in zip(PAID, GROUPS, strict=True) if group == g]) for g in range(3)]
    std = torch.stack([x.std() for x in scores])
    factor = (std / (std.max() + 1e-6))[plain.group[plain.episode]][:, None]
    torch.testing.assert_close(written(soft, "advantage"), written(plain, "advantage") * factor, atol=1e-6, rtol=0)
    assert factor.min() < 0.5


@pytest.mark.parametrize("name", ALGOS)
def test_a_kl_in_the_reward_is_a_reward_like_any_other(name):
    """Advantages are those of rewards that are less by kl_coef times the KL of each sampled token."""
    data, other, without = rich(), rich(), rich()
    for batch in (data, other, without):
        batch.reward, batch.score = batch.reward.double(), batch.score.double()
    agent, plain = algo(ALGOS[name], {"kl_coef": 0.3, "kl_in": "reward"}), algo(ALGOS[name], {"kl_coef": 0.0})
    agent.prepare(data)
    cost = 0.3 * agent.distance(data)
    other.reward = other.reward - cost
    other.score = other.score - torch.zeros_like(other.score).index_add(0, other.episode, cost.sum(1))
    plain.prepare(other)
    plain.prepare(without)
    torch.testing.assert_close(written(data, "advantage"), written(other, "advantage"), atol=1e-9, rtol=0)
    assert not torch.allclose(written(data, "advantage"), written(without, "advantage"), atol=1e-3)

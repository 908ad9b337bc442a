"""Settings and names of the optimizers: unknown ones list the known, yours are found, the document is true."""

import itertools
import math
import re
import shlex
from pathlib import Path

import pytest

from ragen_agent.algos import ALGOS, GRPO, PPO, DrGRPO, StarPO, find
from ragen_agent.algos.starpo import written
from ragen_agent.settings import pairs
from tests.algo_parts import WHOLE, batch, gradient, policy


@pytest.mark.parametrize("kind", ALGOS.values())
@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"clip_hi": 0.1}, "clip_low, clip_high"),
        ({"aggregation": "mean"}, "token-mean"),
        ({"kl_kind": "k4"}, "k1"),
        ({"kl_coef": 0.1}, "reference"),
        ({"clip_high": "wide"}, "float"),
        ({"clip_high": True}, "float"),
        ({"clip_high": None}, "float"),
        ({"dual_clip": "3"}, "float or None"),
        ({"train": False}, "known"),
        ({"refill": 3}, "known"),
        ({"ratio": "episode"}, "token, sequence, sequence-token"),
        ({"kl_in": "both"}, "loss, reward"),
        ({"correction": "clip"}, "truncate, mask or None"),
        ({"correction_level": "turn"}, "token, sequence"),
        ({"dual_clip": 1.0}, "above 1"),
        ({"clip_low": -0.1}, "at least 0"),
        ({"clip_high": math.nan}, "float"),
        ({"entropy_coef": math.nan}, "float"),
        ({"kl_coef": -0.1}, "at least 0"),
        ({"temperature": -1}, "at least 0"),
        ({"horizon": 0}, "above 0"),
        ({"kl_target": 0}, "above 0"),
        ({"kl_target": 0.1}, "kl_coef"),
        ({"correction_low": 3.0}, "above correction_high"),
    ],
)
def test_bad_settings_are_errors_that_list_the_known(kind, bad, told):
    with pytest.raises(ValueError, match=told):
        kind(policy(), **bad)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"credit": "row"}, "token, bi-level, turn"),
        ({"gamma": 1.1}, "from 0 to 1"),
        ({"lam": -0.1}, "from 0 to 1"),
        ({"turn_gamma": 2}, "from 0 to 1"),
        ({"value_clip": -1}, "at least 0"),
        ({"value_coef": -1}, "at least 0"),
    ],
)
def test_bounds_of_ppo(bad, told):
    with pytest.raises(ValueError, match=told):
        PPO(policy(), **bad)


@pytest.mark.parametrize("settings", [{"kl_coef": 0.1}, {"kl_coef": 0.1, "kl_in": "reward"}])
def test_who_wants_a_reference(settings):
    assert not PPO.wants_reference(clip_high=0.3) and not PPO(policy()).uses_reference
    assert PPO.wants_reference(**settings) and PPO(policy(), reference=policy(), **settings).uses_reference
    with pytest.raises(ValueError, match="needs a reference"):
        PPO(policy(), **settings)


def test_settings_are_those_of_the_class_and_its_parents():
    assert list(GRPO.settings()) == list(StarPO.settings()) + ["std"]
    assert GRPO.settings()["aggregation"] == "seq-mean-token-mean" and not DrGRPO.settings()["std"]
    assert GRPO(policy(), std=False).std is False and GRPO.std is True
    assert GRPO(policy(), dual_clip=None, clip_low=1).clip_low == 1


def test_forward_before_prepare_says_so():
    with pytest.raises(ValueError, match="prepare"):
        GRPO(policy())(batch())


@pytest.mark.parametrize("name", ALGOS)
def test_find_ours(name):
    assert find(name).__name__ == name


def test_find_yours(tmp_path, monkeypatch):
    (tmp_path / "my_algo_file.py").write_text(
        '''"""Mine."""
import torch
from ragen_agent.algos import StarPO


class Sign(StarPO):
    """The sign of the return."""

    scale: float = 1.0
    """Its size."""

    def advantage(self, batch):
        """Plus or minus scale."""
        return self.scale * batch.score.sign()[batch.episode][:, None].expand(batch.ids.shape)
'''
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    agent, data = find("my_algo_file:Sign")(policy(), scale=2.0), batch()
    agent.prepare(data)
    assert written(data, "advantage")[0].tolist() == [0, 0, 2, 2, 0, 2, 2, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="Sign"):
        find("my_algo_file:Sing")


@pytest.mark.parametrize("name", ["grpo", "", "no_such_file:GRPO", "StarPO"])
def test_find_lists_the_known(name):
    with pytest.raises(ValueError, match="ARPO, BRPO, DrGRPO, GRPO, PPO"):
        find(name)


# ---- the document ----

DOCUMENT = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text()


def test_the_optimizer_in_the_document_works():
    names = {}
    exec(re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)[1], names)
    data = batch()
    agent = names["LeaveOneOut"](policy(), strength=2.0)
    agent.prepare(data)
    firsts = [written(data, "advantage")[i, data.sampled[i]][0].item() for i in (0, 1, 2)]
    assert firsts == pytest.approx([2 * (1 - 0.15), 2 * (-0.1 - 0.7), 2 * (0.4 - 0.45)], abs=1e-6)
    assert gradient(agent, data, WHOLE)[0].abs().max() > 1e-3


@pytest.mark.parametrize("kind", ALGOS.values())
def test_every_setting_and_metric_is_in_the_document(kind):
    data, agent = batch(), kind(policy(), reference=policy(7), kl_coef=0.1)
    notes, (_, metrics) = agent.prepare(data), agent(data)
    missing = [name for name in [*kind.settings(), *notes, *metrics, kind.__name__] if f"`{name}`" not in DOCUMENT]
    assert not missing


def test_every_recipe_in_the_document_is_accepted():
    """Names, settings and how the filter is set: a recipe that says nothing trains on half of the groups."""
    table = DOCUMENT.partition("## Recipes")[2].partition("##")[0]
    rows = [shlex.split(command) for command in re.findall(r"`(--algo [^`]*)`", table)]
    assert len(rows) == 11
    for flags in rows:
        name = flags[1].replace("NAME", "GSPO")
        given = itertools.dropwhile(lambda text: text != "--algo-args", flags)
        args = itertools.takewhile(lambda text: not text.startswith("--"), list(given)[1:])
        find(name)(policy(), reference=policy(), **({"critic": policy()} if "critic_model=true" in flags else {}), **pairs(tuple(args)))
        assert flags[-2] == "--keep", flags

"""What the tests of the table of optimizers share: games with rewards by turn and states, and every preset on one rich batch."""

from collections.abc import Sequence

import torch
from torch import Tensor, tensor

from ragen_agent.algos.starpo import StarPO, written
from ragen_agent.batch import Batch
from tests.algo_parts import batch_of

Paid = Sequence[Sequence[float]]


def game(rows: list[tuple[int, str]], paid: Paid, groups: list[int], states: list[list[int]] | None = None) -> Batch:
    """As `batch_of`, with `paid[e][k]` for turn k of episode e on its last token, and `states[e][k]` as the state that it began in."""
    data = batch_of(rows, [sum(turns) for turns in paid], groups)
    data.reward.zero_()
    for i, (episode, pattern) in enumerate(rows):
        last = {int(p): c for c, p in enumerate(pattern) if p != "."}
        for k, c in last.items():
            data.reward[i, c] = paid[episode][k]
            if states is not None:
                data.state[i, data.sampled[i] & (data.turn[i] == k)] = states[episode][k]
    return data


ROWS = [
    *[(0, "..00.11"), (1, "..0"), (2, "..0000000"), (3, "..0.1"), (3, "..2.33"), (4, "..00..11..2"), (5, "...0"), (5, "..1.222")],
    *[(6, ".00.1"), (7, "..0.11"), (8, ".0"), (9, "..00.1")],
]
PAID = [[1.0, 0.0], [-0.1], [0.4], [0.5, 0.0, 0.5, 1.0], [-1.0, 0.0, 0.25], [0.1, 0.2, 0.0], [0.0, 5.0], [4.5, -0.5], [5.0], [-1.8, -0.2]]
GROUPS = [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
STATES = [[0, 1], [0], [0], [2, 3, 2, 4], [2, 3, 5], [2, 4, 5], [6, 7], [6, 7], [6], [6, 8]]


def rich() -> Batch:
    """Three groups of 3, 3 and 4 episodes of 1 to 4 turns in 12 rows (two episodes have two), of two worlds, with states."""
    data = game(ROWS, PAID, GROUPS, STATES)
    data.world = tensor(GROUPS) // 2
    return data


def by_turns(agent: StarPO, data: Batch) -> list[list[float]]:
    """The advantage of each turn of each episode; all tokens of a turn must agree."""
    agent.prepare(data)
    found: dict[int, dict[int, list[float]]] = {}
    advantage = written(data, "advantage")
    for i, c in data.sampled.nonzero().tolist():
        found.setdefault(int(data.episode[i]), {}).setdefault(int(data.turn[i, c]), []).append(float(advantage[i, c]))
    assert not advantage[~data.sampled].any()
    for turns in found.values():
        assert all(value == values[0] for values in turns.values() for value in values)
    return [[found[e][k][0] for k in sorted(found[e])] for e in sorted(found)]


def policy_gradient(agent: StarPO, data: Batch) -> Tensor:
    """The gradient of the whole step in the policy's weights."""
    agent.zero_grad()
    agent(data)[0].backward()
    return torch.cat([torch.zeros_like(w).flatten() if w.grad is None else w.grad.flatten().clone() for w in agent.policy.parameters()])

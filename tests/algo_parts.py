"""What the tests of the optimizers share: batches drawn by pattern, every optimizer with its settings, gradients of a cut step."""

import pytest
import torch
from torch import Tensor, nn, tensor

from ragen_agent.algos import ALGOS, ARPO, BRPO, GRPO, PPO, DrGRPO, StarPO, combine
from ragen_agent.batch import Batch
from tests.parts import tiny

VOCAB = 11
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
DISCOUNTED = {"gamma": 0.9, "lam": 0.8, "value_clip": 0.1, "temperature": 0.7, "aggregation": "seq-mean-token-mean"}
CASES = [  # every way to train that has a denominator, a model or a ratio of its own
    (ARPO, {}),
    (BRPO, {"clamp_low": -1.0, "clamp_high": 3.0}),
    (GRPO, {"dual_clip": 3.0}),
    (GRPO, {"aggregation": "token-mean", "kl_coef": 0.1, "entropy_coef": 0.01, "correction": "truncate"}),
    (GRPO, {"ratio": "sequence-token", "correction": "truncate", "correction_level": "sequence"}),
    (DrGRPO, {}),
    (DrGRPO, {"aggregation": "seq-mean-token-sum-norm", "horizon": 9.0, "ratio": "sequence", "reweight": True}),
    (PPO, {}),
    (PPO, {**DISCOUNTED, "kl_coef": 0.1, "kl_in": "reward"}),
    (PPO, {"credit": "bi-level", "detach": True, "whiten": False, "entropy_coef": 0.01}),
    (PPO, {"credit": "turn", "bootstrap": True, "turn_gamma": 0.9, "lam": 0.9, "value_clip": 0.1}),
]
FURTHER = [  # those that the laws of exactness alone go through, with every optimizer as it comes
    (GRPO, {"kl_coef": 0.1, "kl_target": 0.01, "kl_kind": "k2", "correction": "mask", "correction_low": 0.05, "correction_high": 0.9}),
    (GRPO, {"kl_coef": 0.1, "kl_target": 0.01, "kl_in": "reward", "aggregation": "seq-mean-token-sum"}),
    (PPO, {"critic_model": True, "bootstrap": True, "kl_coef": 0.1, "kl_kind": "k1"}),
    (PPO, {"ratio": "sequence", "credit": "bi-level", "bootstrap": True, "correction": "mask", "correction_level": "sequence"}),
    *((kind, {}) for kind in ALGOS.values() if kind not in {kind for kind, _ in CASES}),
]
EVERY = pytest.mark.parametrize(("kind", "settings"), CASES, ids=[f"{kind.__name__}-{i}" for i, (kind, _) in enumerate(CASES)])


def policy(seed: int = 0, vocab: int = VOCAB, **settings) -> nn.Module:
    return tiny("llama", vocab_size=vocab, seed=seed, **{**SMALL, **settings}).double()


def algo(kind: type[StarPO], settings: dict, seed: int = 0) -> StarPO:
    own = {"critic": policy(5)} if kind.wants_critic(**settings) else {}
    made = kind(policy(seed), reference=policy(7), **own, **settings)
    if isinstance(made, PPO):  # a critic that says something
        nn.init.constant_(made.critic.weight, 0.1)
        nn.init.constant_(made.critic.bias, 0.3)
    return made


def batch_of(rows: list[tuple[int, str]], scores: list[float], groups: list[int], seed: int = 0) -> Batch:
    """Rows as (episode, pattern): in a pattern a digit is a token sampled in that turn, a dot one that was read, > what lies ahead."""
    chance = torch.Generator().manual_seed(seed)
    width = max(len(pattern) for _, pattern in rows)
    real = tensor([[c < len(p) for c in range(width)] for _, p in rows])
    sampled = tensor([[p[c : c + 1].isdigit() for c in range(width)] for _, p in rows])
    turn = tensor([[int(p[c]) if p[c : c + 1].isdigit() else 0 if c < len(p) else -1 for c in range(width)] for _, p in rows])
    reward = torch.zeros(len(rows), width)
    for i, (episode, pattern) in enumerate(rows):
        last = {p: c for c, p in enumerate(pattern) if p.isdigit()}
        turns = len({p for e, pat in rows if e == episode for p in pat if p.isdigit()})
        for c in last.values():
            reward[i, c] = scores[episode] / turns
    return Batch(
        ids=torch.randint(VOCAB, (len(rows), width), generator=chance) * real,
        real=real,
        sampled=sampled,
        turn=turn,
        reward=reward,
        logprob=-3 * torch.rand(len(rows), width, generator=chance) * sampled,
        episode=tensor([e for e, _ in rows]),
        group=tensor(groups),
        score=tensor(scores),
        truncated=torch.zeros(len(scores), dtype=torch.bool),
        world=torch.zeros(len(scores), dtype=torch.int64),
        state=torch.full((len(rows), width), -1),
        ahead=tensor([[p[c : c + 1] == ">" for c in range(width)] for _, p in rows]),
    )


ROWS = [(0, "..00.11"), (1, "..0"), (2, "..0000000.>"), (3, "..0.1"), (3, "..2.33"), (4, "..00..11..2"), (5, "...0"), (5, "..1.222")]
SCORES, GROUPS = [1.0, -0.1, 0.4, 2.0, -1.0, 0.3], [0, 0, 0, 1, 1, 1]


def batch() -> Batch:
    data = batch_of(ROWS, SCORES, GROUPS)
    data.state = data.group[data.episode][:, None] * 2 + data.turn.clamp(min=0) % 2  # turns of a group that are both even began alike
    data.truncated[2] = True
    return data


def moved(agent: StarPO) -> StarPO:
    """As after some steps: the policy is no longer the one that `prepare` saw, so that clips and ratios take part."""
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in agent.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=chance, dtype=weight.dtype)
    return agent


def gradient(agent: StarPO, data: Batch, parts: list[list[int]]) -> tuple[Tensor, dict[str, float]]:
    agent.zero_grad()
    totals, metrics = agent.totals(data), []
    for part in parts:
        loss, seen = agent(data.rows(tensor(part)), totals)
        loss.backward()
        metrics.append(seen)
    grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in agent.parameters()]
    return torch.cat([g.flatten() for g in grads]).clone(), combine(metrics)


WHOLE = [list(range(8))]

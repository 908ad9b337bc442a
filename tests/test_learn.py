"""One round's learning: bad steps are skipped, memory runs out gracefully, empty rounds count, and the right episodes train."""

from math import inf, nan

import pytest
import torch

from ragen_agent import learn
from ragen_agent.algos import ARPO, DAPO, PPO
from ragen_agent.engines import Engine
from ragen_agent.learn import Learn, batch_of, chosen, improve, refilled
from ragen_agent.steps import Standing
from tests.algo_parts import policy
from tests.parallel_parts import ahead, double, episodes

FLAGS = {"keep": 1.0, "minibatch": 6, "micro_tokens": 1000, "grad_clip": 1.0}  # 18 episodes: three steps a round

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"),
]


class Shaky(ARPO):
    """ARPO whose loss is spoilt in the passes that `bad` numbers, and that has memory for `room` rows at once."""

    def __init__(self, *models, spoil=None, bad=(), room=10**6, error=ERRORS[0], **settings):
        super().__init__(*models, **settings)
        self.spoil, self.bad, self.room, self.error, self.passes, self.looks = spoil, bad, room, error, 0, 0

    def see(self, batch):
        if len(batch) > self.room:
            raise self.error
        return super().see(batch)

    def prepare(self, *given, **named):
        self.looks += 1
        return super().prepare(*given, **named)

    def forward(self, batch, totals=None):
        loss, told = super().forward(batch, totals)
        self.passes += 1
        if self.passes in self.bad:
            weight = self.policy.lm_head.weight
            steep = (weight - weight.detach()).abs().sqrt().sum()  # 0, and no gradient there
            loss = loss + {"loss": weight.sum() * nan, "infinite": weight.sum() * inf, "gradient": steep}[self.spoil]
            told["loss"] = loss.detach()
        return loss, told


def engine_of(**settings) -> Engine:
    return Engine(Shaky(policy(), **settings), lambda made: torch.optim.SGD(made.parameters(), lr=0.1))


def weights(engine: Engine) -> list[torch.Tensor]:
    return [p.detach().clone() for p in engine.algo.parameters()]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    monkeypatch.setattr(learn, "collate", double)


# -- what is not finite --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", ["loss", "infinite", "gradient"])
def test_a_bad_step_moves_nothing_and_is_counted(spoil):
    engine, standing = engine_of(spoil=spoil, bad=(1, 2, 3)), Standing()
    before = weights(engine)
    row = improve(Learn(**FLAGS), engine, episodes(), 1, standing)
    assert same(before, weights(engine)) and standing.skipped == 3
    assert (row["skipped"], row["updates"]) == (3, 0) and "loss" not in row and "grad_norm" not in row


@pytest.mark.parametrize("spoil", ["loss", "gradient"])
def test_good_steps_go_on_and_end_the_count(spoil):
    engine, standing = engine_of(spoil=spoil, bad=(2,)), Standing(skipped=3)
    row = improve(Learn(**FLAGS), engine, episodes(), 1, standing)
    assert (row["skipped"], row["updates"], standing.skipped) == (1, 2, 0)
    assert all(p.isfinite().all() for p in weights(engine)) and row["loss"] == row["loss"] and row["grad_norm"] < inf
    part = engine_of(spoil=spoil, bad=(2, 3))
    improve(Learn(**FLAGS), part, episodes(), 1, Standing())
    assert not same(weights(part), weights(engine))  # the step after the bad one was made


def test_the_critics_gradient_does_not_shrink_the_policys():
    """Without a share in the policy's body, returns a hundred times as large move the critic otherwise and the policy not at all."""

    def moved(scale: float) -> tuple[dict[str, float], list[torch.Tensor], list[torch.Tensor]]:
        engine = Engine(PPO(policy(), detach=True), lambda made: torch.optim.SGD(made.parameters(), lr=0.1))
        assert isinstance(engine.algo, PPO)
        torch.nn.init.zeros_(engine.algo.critic.weight)  # so that values are 0, and advantages the returns, which are whitened
        played = episodes()
        for turn in (turn for episode in played for turn in episode.turns):
            turn.reward *= scale
        row = improve(Learn(**{**FLAGS, "minibatch": 0, "grad_clip": 0.05}), engine, played, 1, Standing(), contexts=ahead)
        return row, [p.detach().clone() for p in engine.algo.policy.parameters()], [engine.algo.critic.weight.detach().clone()]

    (small, body, head), (large, same_body, other_head) = moved(1.0), moved(100.0)
    assert large["critic_grad_norm"] == pytest.approx(100 * small["critic_grad_norm"], rel=1e-6) and small["critic_grad_norm"] > 0.05
    assert large["grad_norm"] == pytest.approx(small["grad_norm"], rel=1e-6) and small["grad_norm"] > 0.05  # both are cut
    for one, two in zip(body + head, same_body + other_head, strict=True):
        torch.testing.assert_close(one, two, atol=1e-9, rtol=0)


def test_too_many_bad_steps_in_a_row_stop_the_run_over_rounds():
    engine, standing, config = engine_of(spoil="loss", bad=range(1, 100)), Standing(), Learn(**FLAGS, max_skipped=5)
    before = weights(engine)
    improve(config, engine, episodes(), 1, standing)
    again = Standing(**vars(standing))  # as a checkpoint keeps it
    with pytest.raises(ValueError, match=r"round 2: 5 optimizer steps in a row .* not finite.*last good step"):
        improve(config, engine, episodes(), 2, again)
    assert same(before, weights(engine)) and engine.algo.passes == 5
    assert all(p.grad is None for p in engine.algo.parameters())


# -- memory --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "cpu", "windows"])
def test_less_memory_gives_the_same_numbers(error):
    plenty, scarce, said = engine_of(), engine_of(room=2, error=error), []
    standing, config = Standing(), Learn(**FLAGS)
    row = improve(config, scarce, episodes(), 1, standing, said.append)
    assert 0 < standing.micro_tokens < 1000 and row["micro_tokens"] == standing.micro_tokens
    assert said and all("out of memory" in text and "going on with" in text for text in said) and str(standing.micro_tokens) in said[-1]
    whole = improve(config, plenty, episodes(), 1, Standing())
    small = engine_of()
    start = improve(Learn(**{**FLAGS, "micro_tokens": standing.micro_tokens}), small, episodes(), 1, Standing())
    for one, two, three in zip(weights(plenty), weights(scarce), weights(small), strict=True):
        torch.testing.assert_close(one, two, atol=1e-12, rtol=0)
        torch.testing.assert_close(three, two, atol=1e-12, rtol=0)
    assert {**row, "micro_tokens": 0} == pytest.approx({**whole, "micro_tokens": 0}, abs=1e-6)
    assert row == pytest.approx(start, abs=1e-6)


def test_memory_that_runs_out_half_way_leaves_no_half_gradient():
    """The first minibatch fails in its second micro-batch, after the first has left a gradient."""
    error = ERRORS[0]
    engine, plain, failed = engine_of(), engine_of(), []
    inner = engine.algo.forward

    def once(batch, totals=None):
        if engine.algo.passes == 1 and not failed:
            failed.append(True)
            raise error
        return inner(batch, totals)

    engine.algo.forward = once
    flags = {**FLAGS, "micro_tokens": 30}
    improve(Learn(**flags), engine, episodes(), 1, Standing())
    improve(Learn(**flags), plain, episodes(), 1, Standing())
    assert failed
    for one, two in zip(weights(plain), weights(engine), strict=True):
        torch.testing.assert_close(one, two, atol=1e-12, rtol=0)


def test_no_memory_for_one_row_is_an_error():
    engine = engine_of(room=0)
    before = weights(engine)
    with pytest.raises(ValueError, match=r"single row of \d+ tokens: CUDA out of memory"):
        improve(Learn(**FLAGS), engine, episodes(), 1, Standing())
    assert same(before, weights(engine))


def test_another_error_is_not_taken_for_memory():
    with pytest.raises(RuntimeError, match="shapes"):
        improve(Learn(**FLAGS), engine_of(room=2, error=RuntimeError("shapes do not match")), episodes(), 1, Standing())


# -- which episodes ------------------------------------------------------------------------------------------------------------


def seeds(kept) -> list[int]:
    return sorted({t.seed for t in kept})


def test_empty_rounds_are_counted_and_stop_the_run():
    flat = [t for t in episodes() if t.seed in (1, 4)]
    engine, standing, config = engine_of(), Standing(), Learn(**{**FLAGS, "keep": 0.5}, max_empty=3)
    before = weights(engine)
    for count in (1, 2):
        row = improve(config, engine, flat, count, standing)
        assert (row["empty"], row["kept"], row["kept_groups"]) == (count, 0, 0) and "updates" not in row
    assert improve(config, engine, episodes(), 3, standing)["empty"] == standing.empty == 0
    assert not same(before, weights(engine))
    standing.empty = 2
    with pytest.raises(ValueError, match="round 4: nothing to train on in 3 rounds in a row"):
        improve(config, engine, flat, 4, standing)


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ({"keep": 1.0}, [0, 1, 2, 3, 4, 5]),
        ({"keep": 0.9999, "filter": "top_k"}, [0, 2, 3, 5]),  # 5 of 6 groups, but two are flat
        ({"keep": 3, "filter": "top_k_abs", "filter_by": "length", "filter_zero": True}, "length"),
        ({"keep": 3, "filter": "top_k_abs", "filter_by": "length", "filter_smallest": True}, "short"),
        ({"keep": 0.34, "filter": "top_k", "filter_by": "mean"}, "mean"),
    ],
)
def test_the_flags_choose_the_groups(flags, kept):
    played = episodes()

    def ranked(number) -> list[int]:  # equal ones in the order of their groups
        return sorted(range(6), key=lambda s: sum(number(t) for t in played if t.seed == s))

    def length(t) -> int:
        return sum(len(turn.reply.ids) for turn in t.turns)

    wanted = {"length": ranked(lambda t: -length(t))[:3], "short": ranked(length)[:3], "mean": ranked(lambda t: -t.reward)[:2]}
    assert seeds(chosen(Learn(**flags), played)[0]) == sorted(wanted[kept] if isinstance(kept, str) else kept)


def test_what_cannot_train_is_dropped_and_told():
    played = episodes()
    played[0].turns[0].reward, played[4].turns[-1].reward, played[7].turns = nan, -inf, []
    kept, told, scale = chosen(Learn(keep=1.0), played)
    assert [t for t in played if t not in kept] == [played[0], played[4], played[7]]
    assert told == {"kept": pytest.approx(15 / 18), "kept_groups": 6, "broken": 2} and scale == 1


def test_the_loss_is_scaled_by_what_is_kept():
    played, flags = episodes(), {**FLAGS, "keep": 0.5, "minibatch": 0, "grad_clip": 1e9}
    start, moved = weights(engine_of()), {}
    for scaling in ("none", "linear", "sqrt"):
        engine = engine_of()
        improve(Learn(**flags, loss_scaling=scaling), engine, played, 1, Standing())
        moved[scaling] = torch.cat([(a - b).flatten() for a, b in zip(weights(engine), start, strict=True)])
    torch.testing.assert_close(moved["linear"], moved["none"] * 0.5, atol=1e-9, rtol=0)  # 3 of 6 groups
    # the model's own norms are in fp32
    torch.testing.assert_close(moved["sqrt"], moved["none"] * 0.5**0.5, atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("flags", "known"),
    [
        ({"filter": "best"}, "top_k_abs"),
        ({"filter_by": "luck"}, "entropy_variance"),
        ({"loss_scaling": "cubic"}, "sqrt"),
        ({"keep": 0.0}, "--keep"),
    ],
)
def test_unknown_filters_name_the_known(flags, known):
    with pytest.raises(ValueError, match=known):
        Learn(**flags).check_learning()


def test_passes_over_one_rollout_keep_its_first_log_probabilities():  # Online-k
    engine = engine_of()
    row = improve(Learn(**{**FLAGS, "minibatch": 0}, epochs=3), engine, episodes(), 1, Standing())
    assert (engine.algo.looks, engine.algo.passes, row["updates"]) == (1, 3, 3)
    assert row["ratio_max"] > 1 + 1e-6
    assert improve(Learn(**{**FLAGS, "minibatch": 0}), engine_of(), episodes(), 1, Standing())["ratio_max"] == pytest.approx(1, abs=1e-9)


def test_a_critic_has_a_rate_of_its_own():
    made = PPO(policy())
    groups = learn.optimizer(Learn(lr=1e-3, critic_lr=1e-2), made).param_groups
    critics = {id(p) for p in made.critic.parameters()}
    for group in groups:
        assert {id(p) in critics for p in group["params"]} == {group["lr"] == 1e-2}
    assert {group["lr"] for group in groups} == {1e-3, 1e-2}
    assert {group["lr"] for group in learn.optimizer(Learn(lr=1e-3), made).param_groups} == {1e-3}


def test_an_optimizer_that_looks_ahead_is_told_what_lay_there():
    played = episodes()
    played[0].no_room = True
    assert played[0].truncated
    batch = batch_of(played, True, ahead)
    wanted = [i for i, t in enumerate(played) if t.truncated and i]
    assert sorted(batch.episode[batch.ahead.any(1)].tolist()) == wanted
    assert not batch_of(played, False, None).ahead.any()
    with pytest.raises(ValueError, match="next contexts"):
        batch_of(played, True, None)


def test_a_process_that_kept_nothing_has_a_batch_of_no_rows():
    batch = batch_of([], True, None)
    assert (len(batch), len(batch.group), len(batch.score), batch.tokens, batch.ids.shape) == (0, 0, 0, 0, (0, 1))


def test_flat_groups_are_played_again():
    asked = []

    def play(k):
        asked.append(k)
        played = [t for t in episodes() if t.seed in ((0, 1, 2), (1, 4), (3, 5))[k]]
        return played

    useful, every = refilled(play, 3, DAPO.refill)
    assert asked == [0, 1, 2] and seeds(useful) == [0, 2, 3] and seeds(every) == [0, 1, 2, 3, 4, 5] and len(every) == 3 * 7
    asked.clear()
    useful, _ = refilled(play, 2, 10)
    assert asked == [0] and seeds(useful) == [0, 2]
    useful, _ = refilled(lambda k: [t for t in episodes() if t.seed == 1], 2, 1)
    assert useful == []

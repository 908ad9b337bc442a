"""score(): log-probabilities of the tokens that are there; the one shift of the project, never a (B, T, V) tensor."""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK = 1 << 24  # logits computed at once: 64 MiB in fp32, whatever the vocabulary
Head = Callable[[Tensor], Tensor]  # (N, H) hidden states -> (N, V) logits
_HEADS: WeakKeyDictionary[nn.Module, tuple[nn.Module, Head]] = WeakKeyDictionary()


class Scores(NamedTuple):
    """Entry t speaks of token t given the tokens before it; column 0 is zero, and so is all that was not asked for."""

    logprob: Tensor  # (B, T) float32
    entropy: Tensor  # (B, T) float32, of the distribution token t was drawn from, in nats
    hidden: Tensor | None  # (B, T, H) the last hidden state before token t, when asked for


def positions(real: Tensor) -> Tensor:
    """(B, T) bool -> (B, T) int64: the position of each real token; padding on the left counts for nothing."""
    return (real.long().cumsum(-1) - 1).clamp_min(0)


def choice(logits: Tensor, token: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(N, V) logits, (N,) tokens -> their (N,) log-probabilities and the (N,) entropies, in fp32, at `temperature`.

    Temperature 0 is greedy play: its log-probabilities are those at temperature 1. A vocabulary entry of logit -inf has no
    probability and adds nothing to the entropy, in the gradient too.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / (temperature or 1.0)
    logp = logits.log_softmax(-1)
    gone = logp == -torch.inf
    entropy = -(logp.exp() * logp.masked_fill(gone, 0.0)).sum(-1)
    return logp.gather(-1, token[:, None]).squeeze(-1), entropy.clamp_min(0.0)


def score(
    model: nn.Module, ids: Tensor, real: Tensor, temperature: float = 1.0, sampled: Tensor | None = None, hidden: bool = False
) -> Scores:
    """Log-probability and entropy of every token of `ids` that `sampled` marks (all real ones without it).

    Shapes: `ids` (B, T) int64, `real` and `sampled` (B, T) bool. Logits are made for the marked tokens only, at most `CHUNK`
    of them at a time, and made again in the backward pass instead of being kept. The first token of a row has no context and
    scores zero.
    """
    body, head = split(model)
    wanted = (real if sampled is None else sampled & real).clone()
    wanted[:, 0] = False
    state = body(input_ids=ids, attention_mask=real.long(), position_ids=positions(real), use_cache=False).last_hidden_state
    before = state[:, :-1][wanted[:, 1:]]  # (N, H): what was known before each marked token
    token = ids[wanted]
    rows = max(1, CHUNK // int(model.config.vocab_size))  # pyright: ignore
    parts = [_choice(head, h, t, temperature, len(token) > rows) for h, t in zip(before.split(rows), token.split(rows), strict=True)]
    logprob, entropy = (torch.cat(column) for column in zip(*parts, strict=True)) if len(token) else (before.sum(-1),) * 2
    blank = torch.zeros(ids.shape, dtype=logprob.dtype, device=ids.device)
    shifted = torch.cat([torch.zeros_like(state[:, :1]), state[:, :-1]], 1) if hidden else None
    return Scores(blank.masked_scatter(wanted, logprob), blank.masked_scatter(wanted, entropy), shifted)


def _choice(head: Head, hidden: Tensor, token: Tensor, temperature: float, again: bool) -> tuple[Tensor, Tensor]:
    def run(hidden: Tensor) -> tuple[Tensor, Tensor]:
        return choice(head(hidden), token, temperature)

    return checkpoint(run, hidden, use_reentrant=False) if again and torch.is_grad_enabled() else run(hidden)  # pyright: ignore


def split(model: nn.Module) -> tuple[nn.Module, Head]:
    """A Hugging Face causal model as (body, head): `head(body(...).last_hidden_state)` are its logits.

    The head knows the soft cap and the scales that some families apply to their logits. The split is checked once against
    the model's own logits; raises `ValueError` where they differ.
    """
    if model not in _HEADS:
        body, output = model.base_model, model.get_output_embeddings()  # pyright: ignore
        head = _scaled(output, model.config)
        _check(model, body, head)  # pyright: ignore
        _HEADS[model] = (body, head)  # pyright: ignore
    return _HEADS[model]


def _scaled(output: nn.Module, config: Any) -> Head:
    """The output embedding with the family's own scaling: Cohere multiplies, Granite divides, Gemma 2 caps by a tanh."""
    settings = config.to_dict()
    times, over = settings.get("logit_scale") or 1.0, settings.get("logits_scaling") or 1.0
    cap = settings.get("final_logit_softcapping")

    def head(hidden: Tensor) -> Tensor:
        logits = output(hidden)
        logits = logits if times == over == 1.0 else logits * times / over
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return head


@torch.no_grad()
def _check(model: nn.Module, body: nn.Module, head: Head) -> None:
    weight = next(model.parameters())
    ids = torch.arange(1, 4, device=weight.device)[None] % int(model.config.vocab_size)  # pyright: ignore
    mask = torch.ones_like(ids)
    own = model(input_ids=ids, attention_mask=mask, position_ids=torch.arange(3, device=ids.device)[None]).logits
    ours = head(body(input_ids=ids, attention_mask=mask, position_ids=torch.arange(3, device=ids.device)[None]).last_hidden_state)
    if not torch.allclose(own.float(), ours.float(), atol=1e-2 if weight.dtype != torch.float32 else 1e-4, rtol=1e-3):
        name = type(model).__name__
        raise ValueError(f"{name} shapes its logits in a way `split` does not know; teach `_scaled` in ragen_agent/model.py")

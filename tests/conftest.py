"""What every test shares: one thread, no network, and the fixtures around `tests.parts`."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for child processes: pytest-xdist already keeps every core busy
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest  # noqa: E402
import torch  # noqa: E402

from tests import parts  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    """Bytes, with the ChatML template."""
    return parts.byte_tokenizer()


@pytest.fixture(scope="session", params=[name for name in parts.TEMPLATES])
def any_template(request):
    """The byte tokenizer with each of the templates in turn, and with none."""
    return parts.byte_tokenizer(request.param)


@pytest.fixture(scope="session")
def pad_is_end():
    """The byte tokenizer whose padding token is its end token."""
    return parts.byte_tokenizer(pad=parts.END)


@pytest.fixture(scope="session")
def split_tokenizer():
    """The tokenizer whose texts can be tokenised in more than one way."""
    return parts.split_tokenizer()


@pytest.fixture(scope="session", params=[name for name in parts.ARCHS])
def any_model(request):
    """A tiny random model of each architecture. Shared by all tests: copy it before training it."""
    return parts.tiny(request.param)


def pytest_collection_modifyitems(items):
    """Tests marked `gpu` are skipped where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

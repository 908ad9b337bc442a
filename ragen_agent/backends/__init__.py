"""Where replies come from: one file a backend, one protocol."""

from ragen_agent.backends.base import Backend, Completion, Sampling
from ragen_agent.backends.hf import HFBackend

__all__ = ["Backend", "Completion", "HFBackend", "Sampling"]

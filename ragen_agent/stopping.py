"""A request to stop (SIGTERM, as schedulers send it), obeyed where nothing is lost: at once in play, else after the round."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STATUS = 128 + signal.SIGTERM  # what a process that SIGTERM ended exits with


class Stopped(Exception):
    """Raised in play when the request comes; the round so far is given up, and no weight has moved."""


class Request:
    """Whether somebody asked the run to stop."""

    def __init__(self) -> None:
        self.asked = False
        self._playing = False

    @contextmanager
    def playing(self) -> Iterator[None]:
        """What is done in here may be broken off by `Stopped`."""
        if self.asked:
            raise Stopped
        self._playing = True
        try:
            yield
        finally:
            self._playing = False

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self._playing:
            self._playing = False  # once is enough: a second signal must not break what cleans up
            raise Stopped


@contextmanager
def on_request() -> Iterator[Request]:
    """Listen to SIGTERM while the block runs; outside the main thread, where Python hears no signals, nobody can ask."""
    request = Request()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    former = signal.signal(signal.SIGTERM, request._heard)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, former)

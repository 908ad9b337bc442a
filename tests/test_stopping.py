"""SIGTERM is obeyed where nothing is lost: it breaks play off, and waits for everything else."""

import os
import signal
import threading

import pytest

from ragen_agent.stopping import STATUS, Stopped, on_request


def ask():
    os.kill(os.getpid(), signal.SIGTERM)


def test_play_is_broken_off_and_learning_is_not():
    with on_request() as request:
        with pytest.raises(Stopped), request.playing():
            ask()
            pytest.fail("went on playing")
        assert request.asked
    with on_request() as request:
        ask()  # in an update: it goes on
        assert request.asked
        with pytest.raises(Stopped), request.playing():
            pytest.fail("began another round")


def test_a_second_signal_does_not_break_what_cleans_up():
    with on_request() as request:
        with pytest.raises(Stopped), request.playing():
            try:
                ask()
            finally:
                ask()
        ask()


def test_the_former_handler_comes_back():
    former = signal.getsignal(signal.SIGTERM)
    with on_request():
        assert signal.getsignal(signal.SIGTERM) is not former
    assert signal.getsignal(signal.SIGTERM) is former
    assert STATUS == 143


def test_in_another_thread_nobody_asks():
    seen = []

    def run():
        with on_request() as request, request.playing():
            seen.append(request.asked)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False]

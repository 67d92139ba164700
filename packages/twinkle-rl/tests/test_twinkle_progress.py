"""Ctrl-C during a run."""

import io
import signal

import pytest
from rich.console import Console

from twinkle.run import Progress


class _InterruptedWhenCollected:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_a_destructor_ends_the_run_at_its_next_message():
    with Progress(1, Console(file=io.StringIO())) as progress:
        collected = _InterruptedWhenCollected()
        del collected  # Python has dropped the exception
        with pytest.raises(KeyboardInterrupt):
            progress.say("next")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_raises_at_once_and_a_handler_of_the_callers_stays():
    with pytest.raises(KeyboardInterrupt), Progress(1, Console(file=io.StringIO())):
        signal.raise_signal(signal.SIGINT)
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    try:
        with Progress(1, Console(file=io.StringIO())) as progress:
            signal.raise_signal(signal.SIGINT)
            progress.say("next")
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [1]

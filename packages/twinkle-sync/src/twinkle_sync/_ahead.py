"""One thing done while another one is: in a thread of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def started(call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Future[T]:
    """Run the call in a new thread; what becomes of it. The thread does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments, **options))
        except BaseException as error:  # raised again where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="twinkle-sync").start()
    return future

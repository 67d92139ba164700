"""The event loop on which `async def` remote methods run: one a process, in a thread of its own, so that what they start goes on between calls."""

import asyncio
import inspect
import threading
import traceback
from collections.abc import Coroutine
from typing import Any

from twinkle_remote._errors import RuntimeStateError

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end on the loop and return its value. Raises RuntimeStateError on the loop itself, which would wait for itself."""
    loop = _running_loop()
    if threading.current_thread() is _thread:
        coroutine.close()
        raise RuntimeStateError(
            f"{coroutine.__qualname__} was called from another component's async method, which would wait for itself: call it in a thread, "
            f"by await asyncio.to_thread(...)"
        )
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()  # an interrupt of this thread; of a coroutine that has ended this does nothing
        raise


def finish(value: Any) -> Any:
    """The value of a coroutine that an async method has returned; any other value as it is."""
    return run(value) if inspect.iscoroutine(value) else value


def task_stacks() -> str:
    """The stacks of the coroutines that are under way, each with a heading; '' if there are none."""
    if _loop is None:
        return ""
    parts: list[str] = []
    for task in asyncio.all_tasks(_loop):
        lines = [entry for frame in task.get_stack() for entry in traceback.format_stack(frame, limit=1)]
        parts.append(f"\nCoroutine {task.get_name()}:\n{''.join(lines).rstrip()}")
    return "".join(parts)


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop, _thread
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name="twinkle-event-loop", daemon=True)
            _thread.start()
        return _loop

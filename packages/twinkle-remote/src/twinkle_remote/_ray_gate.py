"""Which threads are using Ray, so that it is not shut down under them: Ray 2.60 then ends the whole process, or starts a new cluster."""

import threading
from collections import Counter


class Gate:
    """A context that threads enter before they look whether the runtime is open, and leave when they are done with Ray."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # reentrant: an iterator's __del__ may come at any time
        self._inside: Counter[int] = Counter()

    def __enter__(self) -> None:
        with self._changed:
            self._inside[threading.get_ident()] += 1

    def __exit__(self, *exc_info: object) -> None:
        me = threading.get_ident()
        with self._changed:
            self._inside[me] -= 1
            if not self._inside[me]:
                del self._inside[me]
                self._changed.notify_all()

    def wait_until_alone(self, timeout_s: float) -> bool:
        """Wait until no other thread is inside; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside.keys() - {threading.get_ident()}, timeout_s)

"""How many bytes this thread has stored and fetched, and what one call took of a worker's time."""

import threading
from typing import NamedTuple


class Traffic(threading.local):
    """Counters that only grow; of each thread its own, so that a difference belongs to the call that the thread made."""

    fetched_bytes: int = 0
    stored_bytes: int = 0


traffic = Traffic()


class Timing(NamedTuple):
    """Of one call on one worker. received_s: when it began to fetch the arguments; stored_s: when the result was put away (seconds since the
    epoch). fetched_bytes, stored_bytes: of other calls' results, and of its own."""

    received_s: float
    stored_s: float
    fetched_bytes: int
    stored_bytes: int

"""How calls run: queues, futures, trainers and samplers."""

from ._calls import Calls, Context, Handler, Reply, reply_of
from ._queue import CallQueue, Work
from ._sampler import SamplerBackend
from ._trainer import TrainerBackend

__all__ = ["CallQueue", "Calls", "Context", "Handler", "Reply", "SamplerBackend", "TrainerBackend", "Work", "reply_of"]

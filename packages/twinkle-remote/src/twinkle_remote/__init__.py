"""Run Python classes on Ray workers or in process, with mesh-aware dispatch and collect."""

from twinkle_remote._board import ObjectBoard
from twinkle_remote._collect import Weighted
from twinkle_remote._decorators import remote_class, remote_function
from twinkle_remote._errors import (
    CallTimeoutError,
    ClusterConnectionError,
    CollectError,
    ComponentLostError,
    DecorationError,
    DispatchError,
    GroupError,
    MissingCompressionError,
    MissingRayError,
    PlacementTimeoutError,
    RemoteAttributeError,
    RemoteCallError,
    RemoteError,
    RemoteTypeError,
    RuntimeStateError,
    StartTimeoutError,
    WorkerDiedError,
    WorkerError,
)
from twinkle_remote._initialize import initialize
from twinkle_remote._lazy import LazyResult, gather
from twinkle_remote._meeting import HeldPort, Rendezvous
from twinkle_remote._protocol import Runtime
from twinkle_remote._scratch import ScratchFolder
from twinkle_remote._state import current_runtime, held_port, in_worker, rendezvous, shutdown
from twinkle_remote._stats import ComponentStats, MethodStats

__all__ = [
    "CallTimeoutError",
    "ClusterConnectionError",
    "CollectError",
    "ComponentLostError",
    "ComponentStats",
    "DecorationError",
    "DispatchError",
    "GroupError",
    "HeldPort",
    "LazyResult",
    "MethodStats",
    "MissingCompressionError",
    "MissingRayError",
    "ObjectBoard",
    "PlacementTimeoutError",
    "RemoteAttributeError",
    "RemoteCallError",
    "RemoteError",
    "RemoteTypeError",
    "Rendezvous",
    "Runtime",
    "RuntimeStateError",
    "ScratchFolder",
    "StartTimeoutError",
    "Weighted",
    "WorkerDiedError",
    "WorkerError",
    "current_runtime",
    "gather",
    "held_port",
    "in_worker",
    "initialize",
    "remote_class",
    "remote_function",
    "rendezvous",
    "shutdown",
]

"""Verified, versioned weight transfer from trainers to samplers."""

from ._buckets import Bucket, Piece, Unpacker, pack
from ._cuda import CudaIpcTransport, NcclTransport
from ._deadline import Deadline
from ._errors import ChannelMisuse, PeerFailed, ShapesDiffer, SyncError, TensorNotSupported, TransferCorrupted, TransferTimeout, WeightsUnavailable
from ._files import FolderTransport
from ._folder import CheckpointFolder
from ._gloo import GlooTransport
from ._incoming import Incoming
from ._ledger import Ledger, TransferReceipt
from ._manager import CheckpointEngineManager, SyncReport
from ._memory import MemoryTransport
from ._messages import Abort, Begin, End, Message, outgoing
from ._objects import RayTransport
from ._plan import Route, TransferPlan, WorkerInfo
from ._protocols import WeightSink, WeightSource
from ._receiver import WeightReceiver
from ._sender import WeightSender
from ._spec import TensorSpec
from ._state_dict import StateDict, whole_tensors
from ._transport import Transport, make_transport

__all__ = [
    "Abort",
    "Begin",
    "Bucket",
    "ChannelMisuse",
    "CheckpointEngineManager",
    "CheckpointFolder",
    "CudaIpcTransport",
    "Deadline",
    "End",
    "FolderTransport",
    "GlooTransport",
    "Incoming",
    "Ledger",
    "MemoryTransport",
    "Message",
    "NcclTransport",
    "PeerFailed",
    "Piece",
    "RayTransport",
    "Route",
    "ShapesDiffer",
    "StateDict",
    "SyncError",
    "SyncReport",
    "TensorNotSupported",
    "TensorSpec",
    "TransferCorrupted",
    "TransferPlan",
    "TransferReceipt",
    "TransferTimeout",
    "Transport",
    "Unpacker",
    "WeightReceiver",
    "WeightSender",
    "WeightSink",
    "WeightSource",
    "WeightsUnavailable",
    "WorkerInfo",
    "make_transport",
    "outgoing",
    "pack",
    "whole_tensors",
]

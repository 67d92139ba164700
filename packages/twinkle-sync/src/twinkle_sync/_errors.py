"""The errors of twinkle-sync.

```
SyncError
+-- ChannelMisuse (RuntimeError)      a transport or a manager used in a way that cannot work
+-- PeerFailed (ConnectionError)      the other side raised, died or closed the connection
+-- ShapesDiffer (ValueError)         names, shapes or dtypes that the receiver cannot take; nothing was sent
+-- TensorNotSupported (TypeError)    the source yielded something that cannot be sent
+-- TransferCorrupted (ValueError)    a message was lost, reordered or altered; versions or digests differ
+-- TransferTimeout (TimeoutError)    a wait reached its deadline
+-- WeightsUnavailable (RuntimeError) the sampler holds a half-loaded state and refuses to work
```

Each takes its message as its one argument and pickles, since it must cross process borders.
"""


class SyncError(Exception):
    """Base of every error that twinkle-sync raises itself."""


class ChannelMisuse(SyncError, RuntimeError):
    """A transport or a manager was used in a way that cannot work; the message says what to do instead."""


class PeerFailed(SyncError, ConnectionError):
    """The other side of a transfer raised, died or closed the connection."""


class ShapesDiffer(SyncError, ValueError):
    """The sender's tensors are not those of the receiver (names, shapes or, where asked, dtypes). Nothing was sent, and the old weights stay."""


class TensorNotSupported(SyncError, TypeError):
    """A weight source yielded something that cannot be sent (not a dense tensor, or a name twice)."""


class TransferCorrupted(SyncError, ValueError):
    """What arrived is not what was sent: a lost or altered message, another version or another digest."""


class TransferTimeout(SyncError, TimeoutError):
    """A wait reached its deadline; the message names what it waited for."""


class WeightsUnavailable(SyncError, RuntimeError):
    """The sampler's weights are half-loaded: it refuses to work until a synchronisation succeeds."""

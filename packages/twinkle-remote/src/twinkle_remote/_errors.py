"""The errors of twinkle_remote.

RemoteError
 +-- DecorationError          (TypeError)       a class or method that cannot be made remote
 +-- RemoteTypeError          (TypeError)       an argument of the wrong type
 +-- DispatchError            (ValueError)      arguments that cannot be shared out among the workers
 +-- CollectError             (ValueError)      results that cannot be put together
 +-- GroupError               (ValueError)      an unknown group, a mesh that does not fit it, groups that a mode cannot hold
 +-- RuntimeStateError        (RuntimeError)    initialize/shutdown in the wrong order, a result outliving its runtime
 +-- MissingRayError          (ImportError)     mode 'ray' without Ray
 +-- MissingCompressionError  (ImportError)     compress='zstd' without zstandard
 +-- ClusterConnectionError   (ConnectionError) no Ray cluster at the address
 +-- RemoteAttributeError     (AttributeError)  something that is not a remote method, asked of a component on workers
 +-- RemoteCallError                            mixed into the original type: what a worker raised
 |    +-- WorkerError         (RuntimeError)    the same, where the original type cannot be rebuilt here
 +-- WorkerDiedError          (RuntimeError)    a worker process ended
 +-- ComponentLostError       (RuntimeError)    a call on a component whose workers were ended after a failure
 +-- PlacementTimeoutError    (TimeoutError)    the cluster did not give a group its place
 +-- StartTimeoutError        (TimeoutError)    a worker process did not start
 +-- CallTimeoutError         (TimeoutError)    a call did not finish: the ranks that still run

Each takes its message as its one argument and pickles. A cluster that is too small is `twinkle_mesh.PlacementError`.
"""


class RemoteError(Exception):
    """Base of everything that twinkle_remote raises on purpose."""


class DecorationError(RemoteError, TypeError):
    """`remote_class` or `remote_function` on something that it cannot be applied to, or with unknown options."""


class RemoteTypeError(RemoteError, TypeError):
    """An argument of the wrong type."""


class DispatchError(RemoteError, ValueError):
    """The arguments of a call cannot be shared out: fewer items than ranks, or arguments of different lengths."""


class CollectError(RemoteError, ValueError):
    """What the workers returned cannot be put together as `collect` asks."""


class GroupError(RemoteError, ValueError):
    """No such device group, a mesh that is larger or smaller than its group, or groups that this mode cannot hold."""


class RuntimeStateError(RemoteError, RuntimeError):
    """`initialize` twice, or a result or component that is used after `shutdown`."""


class MissingRayError(RemoteError, ImportError):
    """Mode 'ray' needs the package ray, which is not installed."""


class MissingCompressionError(RemoteError, ImportError):
    """`compress='zstd'` needs the package zstandard, which is not installed here or on a node."""


class ClusterConnectionError(RemoteError, ConnectionError):
    """There is no Ray cluster at the address that `initialize` was given."""


class RemoteAttributeError(RemoteError, AttributeError):
    """An attribute or undecorated method of a component that lives on workers."""


class RemoteCallError(RemoteError):
    """What a worker raised. The exception that you catch is an instance of this and of the original type."""


class WorkerError(RemoteCallError, RuntimeError):
    """What a worker raised, where the original exception type cannot be rebuilt in this process."""


class WorkerDiedError(RemoteError, RuntimeError):
    """A worker process ended while it was needed: killed, out of memory, or crashed."""


class ComponentLostError(RemoteError, RuntimeError):
    """The workers of this component were ended after an earlier failure; build the component anew."""


class PlacementTimeoutError(RemoteError, TimeoutError):
    """The cluster did not reserve a device group's place within `start_timeout_s`."""


class StartTimeoutError(RemoteError, TimeoutError):
    """A component's worker processes did not start within `start_timeout_s`."""


class CallTimeoutError(RemoteError, TimeoutError):
    """A call did not finish in time. The message names the ranks that still run."""

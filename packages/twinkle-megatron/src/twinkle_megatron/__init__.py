"""Train with megatron-core behind ten calls, on GPUs and, proven exact, on a CPU.

Importing this package imports neither megatron-core nor mbridge: the first `MegatronModel` (or `twinkle_megatron.cpu.enable()`) chooses the
platform first.
"""

from twinkle_train import AdapterSource

from . import cpu
from ._bridge import Bridge
from ._errors import (
    CheckpointError,
    LayoutError,
    MegatronError,
    ModelNotFoundError,
    PlatformError,
    RuleError,
    UnsupportedModelError,
)
from ._layout import check_layout
from ._model import MegatronModel

__all__ = [
    "AdapterSource",
    "Bridge",
    "CheckpointError",
    "LayoutError",
    "MegatronError",
    "MegatronModel",
    "ModelNotFoundError",
    "PlatformError",
    "RuleError",
    "UnsupportedModelError",
    "check_layout",
    "cpu",
]

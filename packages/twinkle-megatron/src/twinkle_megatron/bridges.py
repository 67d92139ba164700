"""To build a bridge of one's own for a model type that is not supported; see `twinkle_megatron.Bridge`.

Importing this imports megatron-core: do so in the module that your entry point names, which is loaded once the platform is chosen.
"""

from ._mbridge import MBridge, mended
from ._weights import WeightMap

__all__ = ["MBridge", "WeightMap", "mended"]

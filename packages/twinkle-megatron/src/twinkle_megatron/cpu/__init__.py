"""The CPU platform: megatron-core 0.16.1 on a machine without a GPU, over gloo.

:func:`enable` must run before the first import of ``megatron.core``. It installs an import hook that adapts megatron-core's sources in
memory (no file is written, torch stays as it is) and gives the layers that megatron-core takes from TransformerEngine
plain torch bodies under the same parameter names, so that specs and Hugging Face bridges work unchanged.
Where a GPU is used it is never switched on: there megatron-core runs unmodified.
"""

import importlib.metadata
import sys
import warnings

import torch

from .._errors import PlatformError
from . import _cuda_standin
from ._hook import RewritingFinder, rewrite
from ._rules import GENERAL_RULES, SPECIAL_RULES, SUPPORTED_VERSION, GeneralRule, SpecialRule

__all__ = ["GENERAL_RULES", "SPECIAL_RULES", "SUPPORTED_VERSION", "GeneralRule", "SpecialRule", "enable", "is_enabled", "rewrite"]


def is_enabled() -> bool:
    """Whether this process runs megatron-core on the CPU platform."""
    return any(isinstance(finder, RewritingFinder) for finder in sys.meta_path)


def enable() -> None:
    """Switches the CPU platform on for this process. Calling it again does nothing.

    Raises:
        PlatformError: megatron-core is missing, not version 0.16.1, or already imported; or CUDA is in use in this process.
    """
    if is_enabled():
        return
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise PlatformError(f"megatron-core is not installed: pip install megatron-core=={SUPPORTED_VERSION}") from None
    if version != SUPPORTED_VERSION:
        raise PlatformError(
            f"twinkle_megatron's CPU platform is written for megatron-core {SUPPORTED_VERSION}, and {version} is installed: "
            f"pip install megatron-core=={SUPPORTED_VERSION}"
        )
    early = next((name for name in sys.modules if name == "megatron.core" or name.startswith("megatron.core.")), None)
    if early is not None:
        raise PlatformError(
            f"{early} was imported before twinkle_megatron.cpu.enable(), so it can no longer be adapted: call enable() first "
            "(or create the MegatronModel before importing megatron.core)."
        )
    if torch.cuda.is_initialized():
        raise PlatformError("CUDA is in use in this process, where megatron-core runs unmodified: use the CPU platform in a process of its own.")
    sys.meta_path.insert(0, RewritingFinder(_cuda_standin.build()))
    with warnings.catch_warnings():
        # megatron-core warns several times that it falls back to torch: that is what this platform is.
        warnings.filterwarnings("ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed|Transformer Engine and Apex")
        from . import _install

        _install.install()

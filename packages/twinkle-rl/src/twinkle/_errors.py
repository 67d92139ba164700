"""Errors of the glue.

TwinkleError
├── ConfigError (ValueError)             a configuration value, file or flag that cannot be used
├── RunFolderError (OSError)             the run folder cannot be created or written
├── WarmupError (RuntimeError)           the warm-up did not reach its target accuracy
└── MissingExtraError (ImportError)      a layer or an engine is not installed; the message is the install line
"""

from __future__ import annotations


class TwinkleError(Exception):
    """Base of all errors that the package `twinkle` raises itself."""


class ConfigError(TwinkleError, ValueError):
    """A configuration value, file or flag that cannot be used. The message says which and what to write instead."""


class RunFolderError(TwinkleError, OSError):
    """The run folder cannot be created or written (full disk, read-only file system, not empty)."""


class WarmupError(TwinkleError, RuntimeError):
    """The supervised warm-up ended without reaching its target accuracy; the RL run would start from noise."""


class MissingExtraError(TwinkleError, ImportError):
    """A layer or an engine that the call needs is not installed. The message holds the exact `pip install` line."""

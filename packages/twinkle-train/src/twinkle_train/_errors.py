"""The errors of this package; each also inherits the standard type that it is.

TrainError
+- ConfigError (ValueError)          an option that no trainer can honour
+- InputError (ValueError)           features or loss inputs that lack something
+- CallOrderError (RuntimeError)     a method called before the one that it needs
+- UnknownAdapterError (KeyError)    an adapter name that was never added
+- NonFiniteError (ArithmeticError)  a loss or gradient that is NaN or infinite
+- PeerError (RuntimeError)          another rank of the same trainer failed
+- ProcessGroupError (RuntimeError)  torch.distributed could not be brought up
+- CheckpointError (OSError)         a training checkpoint that is not whole, does not fit, or could not be written
"""

from __future__ import annotations


class TrainError(Exception):
    """The base of every error that this package raises on purpose."""


class ConfigError(TrainError, ValueError):
    """An option, name or combination of options that is not supported; the message lists what is."""


class InputError(TrainError, ValueError):
    """Training inputs that lack a field or disagree in shape; the message names the field."""


class CallOrderError(TrainError, RuntimeError):
    """A trainer method was called before the one that it depends on; the message names that one."""


class UnknownAdapterError(TrainError, KeyError):
    """An adapter name that the trainer does not have. Names are compared exactly."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the repr of the message


class NonFiniteError(TrainError, ArithmeticError):
    """A loss, weight or gradient norm is NaN or infinite; the weights were not changed."""


class PeerError(TrainError, RuntimeError):
    """Another rank of this trainer failed, so this rank stops instead of waiting in a collective."""


class ProcessGroupError(TrainError, RuntimeError):
    """The default process group could not be made, or one exists that does not fit."""


class CheckpointError(TrainError, OSError):
    """A training checkpoint is not there, not whole, does not fit the trainer, or could not be written; the message says which and where."""

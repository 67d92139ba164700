"""Errors of twinkle_megatron.

::

    MegatronError
      PlatformError(RuntimeError)          the CPU platform cannot be switched on, or does not fit this megatron-core
      RuleError(PlatformError)             a source rule did not match exactly once
      LayoutError(ValueError)              the mesh does not divide the model, or cannot be used here
      ModelNotFoundError(FileNotFoundError)  model_id is not a folder with a Hugging Face model
      UnsupportedModelError(ValueError)    the architecture, or an option of it, is not supported
      CheckpointError(OSError)             a checkpoint is incomplete, does not fit, or could not be written (also a twinkle_train.CheckpointError)

What the trainer contract asks for (wrong options, calls out of order, inputs that lack a field) is raised as twinkle_train's errors.
Each takes its message as its one argument, so it crosses process boundaries.
"""

import twinkle_train


class MegatronError(Exception):
    """Base class of every error that twinkle_megatron raises on purpose."""


class PlatformError(MegatronError, RuntimeError):
    """The CPU platform cannot be used as asked: a wrong megatron-core version, an import that came too early, a GPU in use."""


class RuleError(PlatformError):
    """A source rule of the CPU platform did not match its module exactly once."""


class LayoutError(MegatronError, ValueError):
    """The device mesh does not divide the model's sizes, or does not fit the processes that run."""


class ModelNotFoundError(MegatronError, FileNotFoundError):
    """The model path is absent, or is not a folder with a Hugging Face model."""


class UnsupportedModelError(MegatronError, ValueError):
    """The model's architecture, or an option in its config.json, is not supported."""


class CheckpointError(MegatronError, twinkle_train.CheckpointError):
    """A checkpoint is incomplete, does not fit the model, or could not be written."""

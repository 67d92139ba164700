"""Errors of twinkle_transformers.

::

    TransformersError
      LayoutError(ValueError)              the mesh does not fit the model, or cannot be used here
      ModelNotFoundError(FileNotFoundError)  model_id is not a folder with a Hugging Face model
      UnsupportedModelError(ValueError)    the model cannot do what is asked; names its class
      CheckpointError(OSError)             a checkpoint is incomplete, does not fit, or could not be written (also a twinkle_train.CheckpointError)

What the trainer contract asks for (wrong options, calls out of order, inputs that lack a field) is raised as twinkle_train's errors.
Each takes its message as its one argument, so it crosses process boundaries.
"""

import twinkle_train


class TransformersError(Exception):
    """Base class of every error that twinkle_transformers raises on purpose."""


class LayoutError(TransformersError, ValueError):
    """The device mesh does not fit the model's sizes, or the processes that run."""


class ModelNotFoundError(TransformersError, FileNotFoundError):
    """The model path is absent, or is not a folder with a Hugging Face model."""


class UnsupportedModelError(TransformersError, ValueError):
    """The model's code cannot do what is asked of it; the message names its class."""


class CheckpointError(TransformersError, twinkle_train.CheckpointError):
    """A checkpoint is incomplete, does not fit the model, or could not be written."""

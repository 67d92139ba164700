"""Data formats, chat templates, datasets and mesh-aware data loading for LLM post-training."""

from ._dataset import Dataset
from ._errors import DataError, DatasetError, FormatError, LoaderStateError, MissingExtraError, SequenceTooLongError, TemplateError
from ._formats import IGNORE_INDEX, InputFeature, Message, Trajectory
from ._loader import DataLoader
from ._processor import Batch, InputProcessor
from ._sampler import DeviceMeshSampler
from ._sampling import ModelOutput, SampledSequence, SampleResponse, SamplingParams, append_context, append_sample
from ._tasks import task_dataset
from ._template import Template

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "DataError",
    "DataLoader",
    "Dataset",
    "DatasetError",
    "DeviceMeshSampler",
    "FormatError",
    "InputFeature",
    "InputProcessor",
    "LoaderStateError",
    "Message",
    "MissingExtraError",
    "ModelOutput",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "SequenceTooLongError",
    "Template",
    "TemplateError",
    "Trajectory",
    "append_context",
    "append_sample",
    "task_dataset",
]

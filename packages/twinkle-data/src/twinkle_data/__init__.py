"""Data formats, chat templates, datasets and mesh-aware data loading for LLM post-training."""

from ._dataset import Dataset, concatenate
from ._errors import (
    DataError,
    DatasetError,
    FormatError,
    LoaderStateError,
    MissingExtraError,
    SequenceTooLongError,
    TemplateError,
    WorkerError,
)
from ._formats import IGNORE_INDEX, InputFeature
from ._loader import DataLoader
from ._messages import Message, PreferencePair, ToolCall, Trajectory
from ._processor import Batch, InputProcessor
from ._prompts import prompt_dataset
from ._sampler import DeviceMeshSampler
from ._sampling import ModelOutput, SampledSequence, SampleResponse, SamplingParams, append_context, append_sample
from ._schema_report import SchemaReport
from ._skipped import Skipped
from ._stream import IterableDataset, mix
from ._tasks import task_dataset
from ._template import Template
from ._turns import train_on_turns, turn_masks, turn_spans, with_turn_advantages

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
    "IterableDataset",
    "LoaderStateError",
    "Message",
    "MissingExtraError",
    "ModelOutput",
    "PreferencePair",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "SchemaReport",
    "SequenceTooLongError",
    "Skipped",
    "Template",
    "TemplateError",
    "ToolCall",
    "Trajectory",
    "WorkerError",
    "append_context",
    "append_sample",
    "concatenate",
    "mix",
    "prompt_dataset",
    "task_dataset",
    "train_on_turns",
    "turn_masks",
    "turn_spans",
    "with_turn_advantages",
]

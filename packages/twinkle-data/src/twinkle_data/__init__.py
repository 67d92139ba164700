"""Data formats, chat templates, datasets and mesh-aware data loading for LLM post-training."""

from ._balance import balanced_order, sequence_costs
from ._batch import Batch
from ._bins import Packs, pack_lengths
from ._dataset import Dataset
from ._errors import (
    DataError,
    DatasetError,
    FormatError,
    LoaderStateError,
    LoaderTimeoutError,
    MissingExtraError,
    NoSignalError,
    SequenceTooLongError,
    TemplateError,
    WorkerError,
)
from ._formats import IGNORE_INDEX, InputFeature, Message, Trajectory
from ._loader import DataLoader
from ._micro_batches import plan_micro_batches
from ._packed import PackedFeature
from ._packing import PackingDataset
from ._packing_stream import IterablePackingDataset
from ._processor import InputProcessor
from ._retry import PromptGroup, RetrySampler
from ._row_streams import RowStream
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
    "IterablePackingDataset",
    "LoaderStateError",
    "LoaderTimeoutError",
    "Message",
    "MissingExtraError",
    "ModelOutput",
    "NoSignalError",
    "PackedFeature",
    "PackingDataset",
    "Packs",
    "PromptGroup",
    "RetrySampler",
    "RowStream",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "SequenceTooLongError",
    "Template",
    "TemplateError",
    "Trajectory",
    "WorkerError",
    "append_context",
    "append_sample",
    "balanced_order",
    "pack_lengths",
    "plan_micro_batches",
    "sequence_costs",
    "task_dataset",
]

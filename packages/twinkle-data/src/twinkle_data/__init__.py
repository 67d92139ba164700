"""Data formats, chat templates, datasets and mesh-aware data loading for LLM post-training."""

from ._balance import balanced_order, sequence_costs
from ._batch import Batch
from ._bins import Packs, pack_lengths
from ._dataset import Dataset, concatenate
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
from ._formats import IGNORE_INDEX, InputFeature
from ._loader import DataLoader
from ._messages import Message, PreferencePair, ToolCall, Trajectory
from ._micro_batches import plan_micro_batches
from ._packed import PackedFeature
from ._packing import PackingDataset
from ._packing_stream import IterablePackingDataset
from ._processor import InputProcessor
from ._prompts import prompt_dataset
from ._retry import PromptGroup, RetrySampler
from ._row_streams import RowStream
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
    "PreferencePair",
    "PromptGroup",
    "RetrySampler",
    "RowStream",
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
    "balanced_order",
    "concatenate",
    "mix",
    "pack_lengths",
    "plan_micro_batches",
    "prompt_dataset",
    "sequence_costs",
    "task_dataset",
    "train_on_turns",
    "turn_masks",
    "turn_spans",
    "with_turn_advantages",
]

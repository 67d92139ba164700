"""Losses, advantages, rewards, metrics and the trainer contract for LLM post-training."""

from ._adapter_files import AdapterSource, check_adapter_matrices, draw_lora_a, merge_adapter, peft_name, read_adapter, save_adapter
from ._advantages import GRPOAdvantage, group_advantages
from ._checkpoint_writer import CheckpointWriter, check_files, check_same_trainer, generators_path, read_checkpoint_pieces, read_generators
from ._checkpoints import (
    AdapterProgress,
    CheckpointInfo,
    begin_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    publish_checkpoint,
    read_checkpoint,
    remove_unfinished,
    unfinished_path,
)
from ._collect import collect_model_output
from ._contract import Inputs, Row, TrainModel
from ._errors import (
    CallOrderError,
    CheckpointError,
    ConfigError,
    InputError,
    NonFiniteError,
    PeerError,
    ProcessGroupError,
    TrainError,
    UnknownAdapterError,
)
from ._hf_checkpoint import staged_folder, write_hf_checkpoint, write_on_rank_zero
from ._lora import LoraConfig
from ._loss import Loss, LossInput, LossOutput
from ._loss_scale import LossScale
from ._losses import CrossEntropyLoss, GRPOLoss, resolve_loss
from ._metrics import AnyMetric, MaxMetric, Metric, combine_metrics
from ._micro_batches import loss_input_from_batch, num_micro_batches, split_micro_batches, unshift_rows
from ._optimizer import OptimizerConfig, adjust_torch_optimizer, build_torch_optimizer
from ._pieces import Piece
from ._policy_losses import CISPOLoss, DROLoss, GSPOLoss, ImportanceSamplingLoss, ReinforceLoss
from ._process_group import init_process_group
from ._remote import remote_train_methods
from ._rewards import ExactMatchReward, Reward, last_word
from ._schedules import LRSchedule
from ._state import Gradients, TrainState, state_of
from ._totals import ReduceGroups, Totals, reduce_max, reduce_sum, reduce_totals
from ._trainer import ComputeLoss, OnNonFinite, TokenOutputs, TrainerBase, Wanted

__all__ = [
    "AdapterProgress",
    "AdapterSource",
    "AnyMetric",
    "CISPOLoss",
    "CallOrderError",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointWriter",
    "ComputeLoss",
    "ConfigError",
    "CrossEntropyLoss",
    "DROLoss",
    "ExactMatchReward",
    "GRPOAdvantage",
    "GRPOLoss",
    "GSPOLoss",
    "Gradients",
    "ImportanceSamplingLoss",
    "InputError",
    "Inputs",
    "LRSchedule",
    "LoraConfig",
    "Loss",
    "LossInput",
    "LossOutput",
    "LossScale",
    "MaxMetric",
    "Metric",
    "NonFiniteError",
    "OnNonFinite",
    "OptimizerConfig",
    "PeerError",
    "Piece",
    "ProcessGroupError",
    "ReduceGroups",
    "ReinforceLoss",
    "Reward",
    "Row",
    "TokenOutputs",
    "Totals",
    "TrainError",
    "TrainModel",
    "TrainState",
    "TrainerBase",
    "UnknownAdapterError",
    "Wanted",
    "adjust_torch_optimizer",
    "begin_checkpoint",
    "build_torch_optimizer",
    "check_adapter_matrices",
    "check_files",
    "check_same_trainer",
    "collect_model_output",
    "combine_metrics",
    "draw_lora_a",
    "generators_path",
    "group_advantages",
    "init_process_group",
    "last_word",
    "list_checkpoints",
    "loss_input_from_batch",
    "merge_adapter",
    "num_micro_batches",
    "peft_name",
    "prune_checkpoints",
    "publish_checkpoint",
    "read_adapter",
    "read_checkpoint",
    "read_checkpoint_pieces",
    "read_generators",
    "reduce_max",
    "reduce_sum",
    "reduce_totals",
    "remote_train_methods",
    "remove_unfinished",
    "resolve_loss",
    "save_adapter",
    "split_micro_batches",
    "staged_folder",
    "state_of",
    "unfinished_path",
    "unshift_rows",
    "write_hf_checkpoint",
    "write_on_rank_zero",
]

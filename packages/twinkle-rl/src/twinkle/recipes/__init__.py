"""Whole jobs, and the parts that they are made of."""

from twinkle.recipes._checkpoints import existing_checkpoint, write_smollm2, write_tiny_qwen3
from twinkle.recipes._evaluate import Evaluation, accuracy, evaluate
from twinkle.recipes._grpo import Checks, GRPOLoop, mean_kl, set_up_actor, train_step
from twinkle.recipes._rollouts import read_rollouts, rollout_record
from twinkle.recipes._run_grpo import build_components, run_grpo, starting_checkpoint
from twinkle.recipes._run_sft import run_sft
from twinkle.recipes._task import Task, make_task
from twinkle.recipes._warmup import WarmupResult, set_up_sft, sft_step, warm_up

__all__ = [
    "Checks",
    "Evaluation",
    "GRPOLoop",
    "Task",
    "WarmupResult",
    "accuracy",
    "build_components",
    "evaluate",
    "existing_checkpoint",
    "make_task",
    "mean_kl",
    "read_rollouts",
    "rollout_record",
    "run_grpo",
    "run_sft",
    "set_up_actor",
    "set_up_sft",
    "sft_step",
    "starting_checkpoint",
    "train_step",
    "warm_up",
    "write_smollm2",
    "write_tiny_qwen3",
]

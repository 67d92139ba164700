"""An example of every body, for the OpenAPI document. In their order they are a session's work, and a test runs them as they are.

MODEL stands for a base model's name; RUN, SESSION and PROCESSOR for ids that earlier answers gave.
"""

from __future__ import annotations

from typing import Any

MODEL, RUN, SESSION, PROCESSOR = "Qwen/Qwen3-0.6B", "run-0123456789abcdef0123", "ses-0123456789abcdef0123", "prc-0123456789abcdef0123"

_MINE: dict[str, Any] = {"adapter_name": "mine"}
_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "1 + 1 = ?"}, {"role": "assistant", "content": "2"}]}
_ROW: dict[str, Any] = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
_CHECKPOINT = f"twinkle://{RUN}/weights/first"

# By the name of the operation, in the order in which they can be run one after another.
EXAMPLES: dict[str, dict[str, Any]] = {
    "create_session": {"metadata": {"user": "alice"}},
    "session_heartbeat": {"session_id": SESSION},
    "model_create": {},
    "model_add_adapter_to_model": {**_MINE, "config": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}, "save_dir": "arithmetic"},
    "model_set_template": {**_MINE, "template": "default", "max_length": 128},
    "model_set_processor": {**_MINE, "processor": "InputProcessor"},
    "model_set_loss": {**_MINE, "loss": "cross_entropy"},
    "model_set_optimizer": {**_MINE, "name": "adamw", "lr": 1e-3, "weight_decay": 0.01},
    "model_adjust_optimizer": {**_MINE, "lr": 5e-4},
    "model_set_lr_scheduler": {**_MINE, "name": "cosine", "warmup_steps": 2, "total_steps": 100},
    "model_add_metric": {**_MINE, "metric": "loss"},
    "model_forward": {**_MINE, "inputs": [_CHAT]},
    "model_calculate_loss": _MINE,
    "model_backward": _MINE,
    "model_clip_grad_norm": {**_MINE, "max_grad_norm": 1.0},
    "model_step": _MINE,
    "model_lr_step": _MINE,
    "model_zero_grad": _MINE,
    "model_forward_backward": {**_MINE, "inputs": [_ROW, _CHAT], "micro_batch_size": 2},
    "model_clip_grad_and_step": {**_MINE, "max_grad_norm": 1.0},
    "model_calculate_metric": _MINE,
    "model_forward_only": {**_MINE, "inputs": [_ROW], "top_k": 2},
    "model_get_state_dict": _MINE,
    "model_get_train_configs": _MINE,
    "model_save": {**_MINE, "name": "first", "user_state": {"epoch": 1}},
    "model_load": {**_MINE, "path": "first"},
    "model_resume_from_checkpoint": {**_MINE, "path": _CHECKPOINT},
    "model_apply_patch": {**_MINE, "patch": "none"},
    "model_upload_to_hub": {**_MINE, "path": "first", "repo_id": "alice/arithmetic"},
    "weights_info": {"twinkle_path": _CHECKPOINT},
    "sampler_create": {},
    "sampler_set_template": {"template": "default"},
    "sampler_add_adapter_to_sampler": {**_MINE, "path": _CHECKPOINT},
    "sampler_sample": {**_MINE, "inputs": [{"messages": _CHAT["messages"][:1]}, "1 + 1 =", [5, 6]], "sampling_params": {"max_tokens": 8, "seed": 1}},
    "sampler_sample_stream": {"adapter_path": _CHECKPOINT, "inputs": [[5, 6]], "sampling_params": {"max_tokens": 8, "temperature": 0.0}},
    "sampler_apply_patch": {"patch": "none"},
    "chat_completions": {"model": MODEL, "messages": _CHAT["messages"][:1], "max_tokens": 8},
    "create_processor": {"processor_type": "dataset", "class_type": "Dataset", "source": [_CHAT]},
    "call_processor": {"processor_id": PROCESSOR, "function": "__len__"},
}


def with_example(name: str) -> dict[str, Any]:
    """What a route adds to its operation in the OpenAPI document."""
    return {"requestBody": {"content": {"application/json": {"example": EXAMPLES[name]}}}}

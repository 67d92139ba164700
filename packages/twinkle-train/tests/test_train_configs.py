import math
from typing import Any

import pytest
import torch

from twinkle_train import ConfigError, LoraConfig, LRSchedule, OptimizerConfig, build_torch_optimizer


def test_constant_schedule_with_warm_up():
    schedule = LRSchedule("constant", warmup_steps=4)
    assert [schedule.factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert LRSchedule().factor(0) == LRSchedule().factor(10**6) == 1.0


def test_linear_schedule_falls_to_its_floor_and_stays():
    schedule = LRSchedule("linear", warmup_steps=2, total_steps=6, min_lr_ratio=0.2)
    assert [schedule.factor(step) for step in range(9)] == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_wsd_schedule_is_stable_until_its_last_steps():
    schedule = LRSchedule("wsd", warmup_steps=2, total_steps=10, min_lr_ratio=0.2, decay_steps=4)
    assert [round(schedule.factor(step), 12) for step in range(12)] == [0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert [LRSchedule("wsd", total_steps=30).factor(step) for step in (27, 30)] == [1.0, 0.0]
    assert LRSchedule("wsd", total_steps=5).factor(4) == 1.0  # a tenth of them, and one at least


def test_cosine_schedule():
    schedule = LRSchedule("cosine", warmup_steps=1, total_steps=9, min_lr_ratio=0.1)
    want = [1.0] + [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1, s / 8))) for s in range(12)]
    assert [schedule.factor(step) for step in range(13)] == pytest.approx(want)
    assert schedule.factor(5) == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "cosin"}, "cosine"),
        ({"name": "linear"}, "total_steps"),
        ({"name": "cosine", "total_steps": 3, "warmup_steps": 3}, "exceed"),
        ({"name": "cosine", "total_steps": 3, "decay_steps": 1}, "only 'wsd'"),
        ({"name": "wsd", "total_steps": 9, "warmup_steps": 3, "decay_steps": 7}, r"\[1, 6\]"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"min_lr_ratio": 2.0}, "min_lr_ratio"),
    ],
)
def test_impossible_schedules_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LRSchedule(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "lion"}, "adamw"),
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"name": "sgd", "momentum": 1.0}, "momentum"),
        ({"name": "adam", "weight_decay": 0.1}, "adamw"),
        ({"name": "adamw", "momentum": 0.9}, "betas"),
        ({"name": "adamw", "options": {"amsgrad": True}}, "takes no options"),
        ({"name": "rmsprop", "momentum": 0.9}, "as options="),
        ({"name": "rmsprop", "options": {"beta": 0.9}}, r"torch.optim.RMSprop has no options beta; it has alpha, .*, momentum"),
    ],
)
def test_optimizer_options_that_would_be_wrong_or_ignored_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**options)


def test_muon_is_for_engines_that_have_it():
    with pytest.raises(ConfigError, match="no optimizer 'muon'"):
        build_torch_optimizer(OptimizerConfig(name="muon", momentum=0.95), [torch.nn.Parameter(torch.ones(2, 2))])


@pytest.mark.parametrize("kind", [torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.RAdam, torch.optim.RMSprop])
def test_torch_optimizers_by_name_and_class_are_torchs_own(kind):
    options: dict[str, Any] = {"alpha": 0.5} if kind is torch.optim.RMSprop else {}
    name = OptimizerConfig.name_of(kind)
    assert name == kind.__name__.lower() == OptimizerConfig.name_of(name)
    ours, theirs = (torch.nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]])) for _ in range(2))
    mine = build_torch_optimizer(OptimizerConfig(name=kind.__name__, lr=0.1, weight_decay=0.1, options=options), [ours])
    plain = kind([theirs], lr=0.1, weight_decay=0.1, **options)
    for _ in range(3):
        for parameter, optimizer in ((ours, mine), (theirs, plain)):
            optimizer.zero_grad()
            parameter.square().sum().backward()
            optimizer.step()
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, torch.tensor([[1.0, -2.0], [0.5, 3.0]]))


def test_optimizers_that_need_whole_weights_are_refused():
    with pytest.raises(ConfigError, match=r"optimizer LBFGS is not known; known are torch.optim.Adadelta"):
        OptimizerConfig.name_of(torch.optim.LBFGS)


def test_optimizer_names_are_case_insensitive():
    assert OptimizerConfig(name="AdamW") == OptimizerConfig(name="adamw")


def test_weight_decay_spares_norms_and_biases():
    matrix, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    optimizer = build_torch_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.5), [matrix, bias, frozen])
    for parameter in (matrix, bias):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 0.95))
    assert torch.equal(bias, torch.ones(2))
    assert torch.equal(frozen, torch.ones(2, 2))


def test_an_optimizer_over_nothing_is_refused():
    with pytest.raises(ConfigError, match="requires a gradient"):
        build_torch_optimizer(OptimizerConfig(), [])


# What peft 0.21 writes for LoraConfig(r=4, lora_alpha=16, target_modules=['v_proj', 'q_proj'], lora_dropout=0.1).
PEFT_DICT = {
    "task_type": None,
    "peft_type": "LORA",
    "auto_mapping": None,
    "peft_version": "0.21.0",
    "base_model_name_or_path": "a/b",
    "revision": None,
    "inference_mode": False,
    "r": 4,
    "target_modules": {"v_proj", "q_proj"},
    "exclude_modules": None,
    "lora_alpha": 16,
    "lora_dropout": 0.1,
    "fan_in_fan_out": False,
    "bias": "none",
    "use_rslora": False,
    "modules_to_save": None,
    "init_lora_weights": True,
    "layers_to_transform": None,
    "layers_pattern": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "trainable_token_indices": None,
    "loftq_config": {},
    "eva_config": None,
    "corda_config": None,
    "use_dora": False,
    "use_qalora": False,
    "qalora_group_size": 16,
    "layer_replication": None,
    "runtime_config": {"ephemeral_gpu_offload": False},
    "lora_bias": False,
    "target_parameters": None,
}


class PeftLike:
    def to_dict(self):
        return dict(PEFT_DICT)


def test_lora_takes_what_peft_writes():
    want = LoraConfig(r=4, lora_alpha=16, target_modules=("q_proj", "v_proj"), lora_dropout=0.1)
    assert LoraConfig.of(PeftLike()) == LoraConfig.of(PEFT_DICT) == LoraConfig.of(want) == want
    assert LoraConfig.of(want.to_dict()) == want
    assert want.scaling == 4.0
    assert LoraConfig(r=4, lora_alpha=16, use_rslora=True).scaling == 8.0


@pytest.mark.parametrize(
    "changed",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"rank_pattern": {"q_proj": 2}},
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "pissa"},
        {"rr": 3},
    ],
)
def test_lora_settings_that_would_be_ignored_are_errors_that_name_them(changed):
    with pytest.raises(ConfigError, match=next(iter(changed))):
        LoraConfig.of(PEFT_DICT | changed)


@pytest.mark.parametrize("options", [{"r": 0}, {"lora_alpha": 0}, {"lora_dropout": 1.0}, {"target_modules": ()}, {"target_modules": ".*q_proj"}])
def test_lora_values_out_of_range_are_refused(options):
    with pytest.raises(ConfigError):
        LoraConfig(**options)

"""Adapters of the trainer contract: names, configurations, and what checkpoints say of them, whatever engine has them."""

import pytest
import torch

from twinkle_data import InputProcessor
from twinkle_train import CheckpointError, ConfigError, LoraConfig, UnknownAdapterError, read_checkpoint
from twinkle_train.testing import ReferenceTrainer, random_features


class Named(ReferenceTrainer):
    """Takes adapters and lets all of them be the base model: only what is kept by name is looked at."""

    def _add_adapter(self, adapter_name, config):
        assert isinstance(config, LoraConfig)

    def _remove_adapter(self, adapter_name):
        self.removed = adapter_name


@pytest.fixture
def trainer(checkpoint):
    trainer = Named(checkpoint)
    trainer.add_adapter_to_model("one", {"r": 4, "target_modules": ["v_proj", "q_proj"]})
    trainer.add_adapter_to_model("one0", LoraConfig(r=2))
    return trainer


def _step(trainer, name):
    trainer.set_loss("cross_entropy", adapter_name=name)
    trainer.set_optimizer("sgd", lr=0.01, adapter_name=name)
    trainer.forward_backward(random_features(), adapter_name=name)
    trainer.clip_grad_and_step(adapter_name=name)


def test_adapters_have_states_of_their_own_by_exact_name(trainer):
    _step(trainer, "one0")
    adapters = trainer.get_train_configs()["adapters"]
    assert [adapters[name]["step"] for name in ("", "one", "one0")] == [0, 0, 1]
    assert adapters["one"]["optimizer"] is None
    assert adapters["one"]["lora"]["target_modules"] == ("q_proj", "v_proj")
    assert adapters[""]["lora"] is None
    with pytest.raises(UnknownAdapterError, match=r"no adapter 'on'; there are \['', 'one', 'one0'\]"):
        trainer.forward_only(random_features(), adapter_name="on")


def test_an_adapter_has_a_processor_of_its_own_or_that_of_the_base(trainer):
    seen = []
    forward = trainer._forward
    trainer._forward = lambda name, batch: (seen.append((name, batch.is_packed)), forward(name, batch))[1]
    trainer.set_processor(InputProcessor(padding_free=True), adapter_name="one")
    for name in ("one", "one0", "", "one"):
        trainer.forward_only(random_features(), adapter_name=name)
    assert seen == [("one", True), ("one0", False), ("", False), ("one", True)]
    trainer.set_processor(InputProcessor(padding_free=True))
    trainer.forward_only(random_features(), adapter_name="one0")
    assert seen[-1] == ("one0", True)


def test_names_that_are_taken_or_empty_and_unknown_settings_are_refused(trainer, checkpoint):
    with pytest.raises(ConfigError, match="there is an adapter 'one' already"):
        trainer.add_adapter_to_model("one", LoraConfig())
    with pytest.raises(ConfigError, match="adapter_name is empty"):
        trainer.add_adapter_to_model("", LoraConfig())
    with pytest.raises(ConfigError, match="use_dora=True"):
        trainer.add_adapter_to_model("other", {"use_dora": True})
    with pytest.raises(UnknownAdapterError):
        trainer.step(adapter_name="other")
    with pytest.raises(ConfigError, match="ReferenceTrainer has no adapters"):
        ReferenceTrainer(checkpoint).add_adapter_to_model("one", LoraConfig())


def test_a_removed_adapter_is_unknown_and_its_name_begins_anew(trainer, checkpoint):
    _step(trainer, "one")
    trainer.remove_adapter("one")
    assert trainer.removed == "one"
    with pytest.raises(UnknownAdapterError, match=r"no adapter 'one'; there are \['', 'one0'\]"):
        trainer.forward_only(random_features(), adapter_name="one")
    trainer.add_adapter_to_model("one", {"r": 2})
    assert trainer.get_train_configs()["adapters"]["one"]["step"] == 0
    with pytest.raises(ConfigError, match=r"the base model \(''\) cannot be removed"):
        trainer.remove_adapter("")
    with pytest.raises(UnknownAdapterError):
        trainer.remove_adapter("on")


def test_a_checkpoint_of_one_adapter_names_it_alone_and_resumes_it_alone(trainer, tmp_path):
    for name in ("one", "one0", "one0"):
        _step(trainer, name)
    trainer.set_lr_scheduler("linear", total_steps=5, adapter_name="one0")
    trainer.save_checkpoint(tmp_path / "own", adapter_name="one0")
    info = read_checkpoint(tmp_path / "own")
    assert info.adapters.keys() == {"one0"}
    assert info.step == 1
    assert info.adapters["one0"].lora == LoraConfig(r=2)
    trainer.save_checkpoint(tmp_path / "all")
    assert read_checkpoint(tmp_path / "all").adapters.keys() == {"", "one", "one0"}
    for path in ("own", "all"):
        for name in ("one", "one0"):
            trainer.forward_backward(random_features(), adapter_name=name)
            trainer.clip_grad_and_step(adapter_name=name)
        trainer.resume_from_checkpoint(tmp_path / path, adapter_name="one0")
        adapters = trainer.get_train_configs()["adapters"]
        assert adapters["one0"]["step"] == 1
        assert adapters["one0"]["lr_scheduler"]["name"] == "linear"
        assert adapters["one"]["step"] > 1


def test_checkpoints_of_other_adapters_are_refused(trainer, checkpoint, tmp_path):
    trainer.save_checkpoint(tmp_path / "own", adapter_name="one0")
    with pytest.raises(CheckpointError, match=r"has no adapter 'one'; it has \['one0'\]"):
        trainer.resume_from_checkpoint(tmp_path / "own", adapter_name="one")
    other = Named(checkpoint)
    with pytest.raises(CheckpointError, match=r"has adapters \['one0'\], this trainer has \[''\]: add them first"):
        other.resume_from_checkpoint(tmp_path / "own")
    other.add_adapter_to_model("one0", LoraConfig(r=4))
    with pytest.raises(CheckpointError, match=r"r=2.*r=4"):
        other.resume_from_checkpoint(tmp_path / "own")


def test_the_state_dict_is_the_weights_as_tensors(trainer):
    state = trainer.get_state_dict()
    weights = trainer.export_weights()
    assert state.keys() == weights.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, torch.as_tensor(weights[name]))
    with pytest.raises(UnknownAdapterError):
        trainer.get_state_dict(adapter_name="other")

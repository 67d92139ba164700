"""MegatronModel as a component: in this process and on Ray workers, with weights sent to another group."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from twinkle_mesh import DeviceGroup, DeviceMesh
from twinkle_remote import initialize, remote_class, remote_function
from twinkle_sync import CheckpointEngineManager, WeightReceiver

pytest.importorskip("ray")


@remote_class()
class Recorder(WeightReceiver):
    """Keeps the weights that it is sent."""

    def __init__(self, remote_group: str | None = None) -> None:
        self.weights: dict[str, Any] = {}

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.weights = {name: tensor.float().numpy().copy() for name, tensor in tensors}

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def recorded(self) -> dict[str, Any]:
        return self.weights


def megatron_model(*args: Any, **kwargs: Any) -> Any:
    from twinkle_megatron import MegatronModel

    return MegatronModel(*args, **kwargs)


def trained_and_sent(model: Any, recorder: Any, features: list[Any]) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Two steps with a transfer after each: the losses, the trainer's weights and those that arrived."""
    manager = CheckpointEngineManager(model=model, sampler=recorder, timeout_s=60)
    model.set_loss("cross_entropy")
    model.set_optimizer("adamw", lr=1e-3)
    losses: list[float] = []
    for _ in range(2):
        losses.append(model.forward_backward(features, micro_batch_size=2).loss)
        model.clip_grad_and_step(1.0)
        manager.sync_weights()
    return losses, model.export_weights(), recorder.recorded()


def same(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_in_one_process_the_weights_that_are_handed_over_are_those_of_the_step(checkpoint: Any, features: list[Any]) -> None:
    model, recorder = megatron_model(checkpoint("qwen3")), Recorder()
    try:
        losses, weights, received = trained_and_sent(model, recorder, features)
        assert losses[1] < losses[0]
        assert same(weights, received)
        model.forward_backward(features)
        model.clip_grad_and_step(1.0)
        assert not same(model.export_weights(), received), "what was handed over must not change with the next step"
    finally:
        model.close()


@pytest.fixture(scope="module")
def ray_runtime() -> Iterator[None]:
    groups = [DeviceGroup("actor", 2, "cpu"), DeviceGroup("sampler", 1, "cpu"), DeviceGroup("four", 4, "cpu")]
    with initialize("ray", groups=groups, threads_per_worker=1, start_timeout_s=180):
        yield


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("ray_runtime")
def test_two_ray_workers_equal_the_reference_and_send_their_weights(checkpoint: Any, features: list[Any], tmp_path: Path) -> None:
    from twinkle_train.testing import ReferenceTrainer, conformance

    path = checkpoint("qwen3")
    mesh = DeviceMesh.from_sizes(tp_size=2, sequence_parallel=True)
    model, recorder = megatron_model(path, device_mesh=mesh, remote_group="actor"), Recorder(remote_group="sampler")
    reference = ReferenceTrainer(path)
    conformance.check_logprobs(model, reference, features)
    conformance.check_loss_and_gradients(model, reference, features, micro_batch_size=2)
    conformance.check_sgd_step(model, reference, features)
    conformance.check_save(model, tmp_path / "saved")
    losses, weights, received = trained_and_sent(model, recorder, features)
    assert losses[1] < losses[0]
    assert same(weights, received)
    assert model.get_train_configs()["mesh"]["device_type"] == "cpu"


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_runtime")
def test_four_ray_workers_pass_the_conformance_suite(checkpoint: Any, tmp_path: Path) -> None:
    from twinkle_train.testing import ReferenceTrainer, conformance

    path = checkpoint("qwen3")
    model = megatron_model(path, device_mesh=DeviceMesh.from_sizes(dp_size=2, pp_size=2), remote_group="four")
    conformance.run_all(model, ReferenceTrainer(path), tmp_path / "saved", has_graph=False)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_runtime")
def test_two_ray_workers_share_experts_and_routing_travels_with_the_rows(checkpoint: Any, features: list[Any]) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2, ep_size=2)
    model = megatron_model(checkpoint("qwen3_moe"), device_mesh=mesh, remote_group="actor")
    own = model.forward_only(features, 2).get().logprobs
    routing = model.record_routing(features, 2)
    assert [each.shape for each in routing] == [(len(row.input_ids), 2, 2) for row in features]
    model.set_router_replay()
    rows = [replace(row, user_data={"routed_experts": each}) for row, each in zip(features, routing, strict=True)]
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(model.forward_only(rows, 2).get().logprobs, own, strict=True))
    model.set_loss("cross_entropy")
    model.set_optimizer("adamw", lr=1e-3)
    losses = [model.forward_backward(rows, 2).loss, model.clip_grad_and_step(1.0), model.forward_backward(rows, 2).loss]
    assert losses[2] < losses[0]
    assert model.calculate_metric()["moe_load_max"] >= 1


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("ray_runtime")
def test_an_error_on_the_workers_reaches_the_driver_as_itself(checkpoint: Any) -> None:
    from twinkle_megatron import LayoutError

    path = checkpoint("qwen3", num_attention_heads=3, num_key_value_heads=1)
    with pytest.raises(LayoutError, match="tp_size=2 does not divide the model's 3 attention heads"):
        megatron_model(path, device_mesh=DeviceMesh.from_sizes(tp_size=2), remote_group="actor")

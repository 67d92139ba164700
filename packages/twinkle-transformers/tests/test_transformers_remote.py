"""TransformersModel on Ray workers, and its weights on their way to a sampler."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinkle_mesh import DeviceGroup, DeviceMesh
from twinkle_remote import initialize, remote_class, remote_function
from twinkle_sync import CheckpointEngineManager, WeightReceiver
from twinkle_transformers import TransformersModel


@remote_class()
class Recorder(WeightReceiver):
    """A sampler that keeps what it is sent."""

    def __init__(self, remote_group: str | None = None) -> None:
        self.received: dict[str, Any] = {}

    def load_weights(self, tensors: Any, version: int) -> None:
        self.received = {name: tensor.float().numpy().copy() for name, tensor in tensors}

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def weights(self) -> dict[str, Any]:
        return self.received


pytest.importorskip("ray")


@pytest.fixture(scope="module")
def ray_runtime() -> Iterator[None]:
    groups = [DeviceGroup("actor", 2, "cpu"), DeviceGroup("sampler", 1, "cpu")]
    with initialize("ray", groups=groups, threads_per_worker=1, start_timeout_s=180):
        yield


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("ray_runtime")
def test_two_ray_workers_equal_the_reference_and_send_their_weights(tmp_path: Path, features: list[Any]) -> None:
    from twinkle_train.testing import ReferenceTrainer, conformance, tiny_qwen3

    path = tiny_qwen3(tmp_path / "qwen3")
    model = TransformersModel(path, device_mesh=DeviceMesh.from_sizes(fsdp_size=2), remote_group="actor")
    reference = ReferenceTrainer(path)
    conformance.check_logprobs(model, reference, features)
    conformance.check_loss_and_gradients(model, reference, features, micro_batch_size=2)
    conformance.check_sgd_step(model, reference, features)
    conformance.check_save(model, tmp_path / "saved")
    recorder = Recorder(remote_group="sampler")
    CheckpointEngineManager(model=model, sampler=recorder).sync_weights()
    sent, received = model.export_weights(), recorder.weights()
    assert sent.keys() == received.keys()
    assert all(np.array_equal(sent[name], received[name]) for name in sent)
    assert model.get_train_configs()["mesh"]["fsdp_size"] == 2
    # Vectors come back in the order of the rows; pairs are of rows of both workers.
    rows = [replace(row, user_data={"group": index % 3}) for index, row in enumerate(features)]
    vectors = np.stack(model.embed(rows, 2))
    assert vectors.shape == (len(rows), 128)
    scores = vectors @ vectors.T / 0.1
    np.fill_diagonal(scores, -np.inf)
    log_total = np.log(np.exp(scores).sum(1))
    expected = [np.mean([log_total[i] - scores[i, j] for j in range(len(rows)) if j != i and j % 3 == i % 3]) for i in range(len(rows))]
    loss = model.contrastive_forward_backward(rows, 2, temperature=0.1).loss
    assert loss is not None
    assert abs(loss - np.mean(expected)) < 1e-5

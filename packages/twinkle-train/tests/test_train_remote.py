"""The remote methods of the contract, on real Ray workers and in process."""

from typing import Any

import numpy as np
import pytest

import twinkle_remote
from twinkle_mesh import DeviceGroup, DeviceMesh
from twinkle_remote import LazyResult, remote_class
from twinkle_train import CallOrderError, ReduceGroups, TrainerBase, init_process_group, remote_train_methods
from twinkle_train.testing import ReferenceTrainer, conformance, random_features


def _remote_trainer() -> Any:
    """Made in a function, so that Ray sends the class to its workers by value: they cannot import this file."""

    class DataParallel(ReferenceTrainer):
        def __init__(self, model_id, device_mesh=None):
            import torch.distributed as dist

            init_process_group("cpu", 60)
            super().__init__(model_id)
            self._groups = ReduceGroups(data=dist.group.WORLD)

        def _reduce_gradients(self, adapter_name):
            import torch.distributed as dist

            for parameter in self._model.parameters():
                dist.all_reduce(parameter.grad)

    return remote_class(execute="all")(remote_train_methods(DataParallel))


@pytest.mark.timeout(180)
def test_a_remote_trainer_of_two_data_ranks_conforms_from_its_driver(checkpoint):
    groups = [DeviceGroup(name="actor", ranks=2, device_type="cpu")]
    rows = random_features((7, 12, 5, 16, 9, 11, 6))
    reference = ReferenceTrainer(checkpoint)
    with twinkle_remote.initialize("ray", groups=groups, threads_per_worker=1):
        trainer = _remote_trainer()(str(checkpoint), device_mesh=DeviceMesh.from_sizes(dp_size=2), remote_group="actor")
        assert isinstance(trainer.forward_only(rows), LazyResult)
        conformance.check_logprobs(trainer, reference, rows)
        conformance.check_loss_and_gradients(trainer, reference, rows, micro_batch_size=2)
        conformance.check_sgd_step(trainer, reference, rows, steps=2, max_grad_norm=1.0)
        conformance.check_metrics(trainer, rows)
        conformance.check_accumulation_equals_one_batch(trainer, rows)
        with pytest.raises(CallOrderError, match="forward_backward"):
            trainer.step()


def test_in_process_the_remote_methods_return_values(checkpoint):
    cls = remote_class(execute="all")(remote_train_methods(type("InProcess", (ReferenceTrainer,), {})))
    trainer, plain = cls(checkpoint), ReferenceTrainer(checkpoint)
    rows = random_features()
    for each in (trainer, plain):
        each.set_loss("cross_entropy")
        each.set_optimizer("sgd", lr=0.1)
    assert trainer.forward_backward(rows).loss == plain.forward_backward(rows).loss
    assert trainer.clip_grad_and_step(1.0) == plain.clip_grad_and_step(1.0)
    assert trainer.calculate_metric() == plain.calculate_metric()
    lazy: Any = trainer.forward_only(rows)
    assert isinstance(lazy, LazyResult)
    want: Any = plain.forward_only(rows)
    np.testing.assert_array_equal(lazy.get().logprobs[0], want.logprobs[0])


def test_making_methods_remote_leaves_the_base_class_alone():
    before = TrainerBase.forward
    remote_train_methods(type("Some", (ReferenceTrainer,), {}))
    assert TrainerBase.forward is before

"""Packed rows and padding-free batches through the reference trainer: the same numbers as padded rows, and what shows if they were not kept apart."""

# Outputs are known to be there.
# pyright: reportOptionalSubscript=false

from dataclasses import replace

import numpy as np
import pytest
import torch

from twinkle_data import InputProcessor, PackedFeature, PackingDataset
from twinkle_train import ConfigError, InputError
from twinkle_train.testing import ReferenceTrainer, conformance, random_features, rollout_features

FREE = InputProcessor(padding_free=True)


@pytest.fixture(scope="module")
def padded(checkpoint):
    return ReferenceTrainer(checkpoint)


@pytest.fixture(scope="module")
def free(checkpoint):
    trainer = ReferenceTrainer(checkpoint)
    trainer.set_processor(InputProcessor(padding_free=True, alignment=8, sequence_alignment=4))
    return trainer


def test_a_padding_free_trainer_conforms(checkpoint, tmp_path):
    trainer = ReferenceTrainer(checkpoint)
    trainer.set_processor(InputProcessor(padding_free=True, alignment=8, sequence_alignment=4))
    conformance.run_all(trainer, ReferenceTrainer(checkpoint), tmp_path / "saved")


def mixed_rows(trainer):
    """Rows at several temperatures, as an older policy sampled them."""
    rows = rollout_features(trainer, random_features())
    return [replace(row, temperature=temperature) for row, temperature in zip(rows, (1.0, 0.7, 1.3, 1.0, 0.5, 2.0), strict=True)]


def test_padded_and_padding_free_batches_give_the_same_per_token_losses(free, padded):
    rows = mixed_rows(padded)
    want, have = (trainer.forward_only(rows) for trainer in (padded, free))
    for row, one, two, entropy_one, entropy_two in zip(rows, want.logprobs, have.logprobs, want.entropy, have.entropy, strict=True):
        assert one.shape == two.shape == row.input_ids.shape
        # fp32: the same products, summed over another number of masked columns.
        np.testing.assert_allclose(two, one, atol=2e-5, rtol=0)
        np.testing.assert_allclose(entropy_two, entropy_one, atol=2e-5, rtol=0)


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_rows_packed_in_any_way_give_the_same_loss_and_gradients(padded, free, loss):
    rows = mixed_rows(padded)
    packed = [PackedFeature(features=rows[:3]), PackedFeature(features=rows[3:5]), rows[5]]
    results = []
    for trainer, inputs, size in ((padded, rows, None), (padded, packed, None), (free, packed, None), (free, packed, 1), (free, rows, 2)):
        trainer.set_loss("grpo", epsilon_high=0.28, beta=0.1, aggregation=loss)
        trainer.zero_grad()
        output = trainer.forward_backward(inputs, micro_batch_size=size)
        results.append((output.loss, output.loss_weight, trainer.export_gradients()))
        trainer.zero_grad()
    loss_value, weight, gradients = results[0]
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    for other_loss, other_weight, other_gradients in results[1:]:
        assert other_loss == pytest.approx(loss_value, abs=1e-6)
        assert other_weight == pytest.approx(weight)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(other_gradients[name], gradient, atol=5e-6 * largest + 5e-5 * np.abs(gradient).max(), rtol=0, err_msg=name)


def test_results_of_a_packed_row_are_its_sequences_one_after_another(padded, free):
    rows = mixed_rows(padded)
    packed = list(PackingDataset(rows, 24))
    assert any(len(row.features) > 1 for row in packed)
    for trainer in (padded, free):
        logprobs = trainer.forward_only(packed).logprobs
        for row, values in zip(packed, logprobs, strict=True):
            want = np.concatenate(padded.forward_only(row.features).logprobs)
            np.testing.assert_allclose(values, want, atol=2e-5, rtol=0)


class Leaking(ReferenceTrainer):
    """Takes a packed row for one sequence, as a model does that is not told where its sequences begin."""

    def _attention(self, batch):
        return {**super()._attention(batch), "cu_seq_lens_q": torch.tensor([0, batch.input_ids.size])}


def test_without_the_boundaries_sequences_see_one_another_and_the_numbers_show_it(checkpoint, padded):
    rows = random_features()
    leaking = Leaking(checkpoint)
    leaking.set_processor(FREE)
    have, want = leaking.forward_only(rows).logprobs, padded.forward_only(rows).logprobs
    np.testing.assert_allclose(have[0], want[0], atol=2e-5)
    assert max(np.abs(one - two).max() for one, two in zip(have[1:], want[1:], strict=True)) > 1e-3


class PlainRows(ReferenceTrainer):
    """An engine that has not been taught packed rows."""

    def __init__(self, path):
        super().__init__(path)
        self._packed_rows = False


def test_an_engine_that_cannot_keep_sequences_apart_refuses_packed_rows(checkpoint):
    trainer = PlainRows(checkpoint)
    with pytest.raises(ConfigError, match="PlainRows does not keep the sequences of one row apart: set padding_free=False"):
        trainer.set_processor(FREE)
    with pytest.raises(InputError, match="PlainRows does not keep the sequences of one row apart: give one sequence a row"):
        trainer.forward_only([PackedFeature(features=random_features())])


def test_the_reference_refuses_packed_rows_where_not_every_layer_keeps_sequences_apart(checkpoint):
    trainer = ReferenceTrainer(checkpoint)
    trainer.set_processor(FREE)
    trainer._model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(InputError, match=r"full attention in all layers.*\['linear_attention'\]"):
        trainer.forward_only(random_features())

"""InputProcessor: what is shifted where, padding, and the way back."""

# Optional arrays are known to be set here, and wrong types are handed in on purpose.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from twinkle_data import FormatError, InputFeature, InputProcessor

SHIFTED = ("logprobs", "ref_logprobs", "advantages")


@st.composite
def features(draw):
    present = draw(st.sets(st.sampled_from(SHIFTED)))
    rows = []
    for length in draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)):
        ids = draw(hnp.arrays(np.int64, length, elements=st.integers(0, 50)))
        labels = np.where(draw(hnp.arrays(np.bool_, length)), ids, -100)
        numbers = hnp.arrays(np.float32, length, elements=st.floats(-8, 8, width=32))
        extra = {name: draw(numbers) for name in present}
        for name in present & {"logprobs", "ref_logprobs"}:
            extra[name][0] = 0
        weights = draw(st.none() | numbers)
        rows.append(InputFeature(input_ids=ids, labels=labels, loss_weights=weights, temperature=draw(st.floats(0.125, 4, width=32)), **extra))
    return rows


processors = st.builds(InputProcessor, pad_token_id=st.integers(0, 50), alignment=st.integers(1, 8), padding_side=st.sampled_from(["left", "right"]))


@settings(deadline=None)
@given(rows=features(), processor=processors)
def test_collating_and_unshifting_gives_back_every_field(rows, processor):
    batch = processor(rows)
    assert batch.input_ids.shape[1] % processor.alignment == 0
    assert batch.input_ids.shape[1] - max(map(len, rows)) < processor.alignment
    columns = {name: batch.unshift(getattr(batch, name)) for name in SHIFTED if getattr(batch, name) is not None}
    for index, row in enumerate(rows):
        own = batch.sequence_ids[index] == index
        np.testing.assert_array_equal(batch.input_ids[index][own], row.input_ids)
        np.testing.assert_array_equal(batch.position_ids[index][own], np.arange(len(row)))
        np.testing.assert_array_equal(batch.temperature[index][own], np.full(len(row), row.temperature, np.float32))
        np.testing.assert_array_equal(batch.unshift(batch.targets)[index][1:], row.input_ids[1:])
        weights = 1 if row.loss_weights is None else row.loss_weights
        np.testing.assert_array_equal(batch.unshift(batch.loss_mask)[index][1:], ((row.labels != -100) * weights)[1:])
        for name in SHIFTED:
            value = getattr(row, name)
            assert (value is None) == (name not in columns)
            if value is not None:
                np.testing.assert_array_equal(columns[name][index][1:], value[1:])
                assert columns[name][index][0] == 0


@settings(deadline=None)
@given(rows=features(), processor=processors)
def test_padding_is_inert(rows, processor):
    batch = processor(rows)
    padding = ~batch.valid
    np.testing.assert_array_equal(batch.valid.sum(1), batch.lengths)
    np.testing.assert_array_equal(batch.sequence_ids == -1, padding)
    assert (batch.input_ids[padding] == processor.pad_token_id).all()
    assert (batch.temperature[padding] == 1).all()
    for name in ("loss_mask", "position_ids", *SHIFTED):
        value = getattr(batch, name)
        assert value is None or (value[padding] == 0).all()


def test_a_column_predicts_the_next_token():
    row = InputFeature(input_ids=[5, 6, 7], labels=[-100, 6, 7], logprobs=[0, -1, -2], advantages=0.5)
    batch = InputProcessor(pad_token_id=9, alignment=4)([row])
    assert batch.input_ids.tolist() == [[5, 6, 7, 9]]
    assert batch.targets.tolist() == [[6, 7, 9, 9]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 0]]
    assert batch.logprobs.tolist() == [[-1, -2, 0, 0]]
    assert batch.advantages.tolist() == [[0.5, 0.5, 0, 0]]
    assert batch.valid.tolist() == [[True, True, True, False]]
    left = InputProcessor(pad_token_id=9, alignment=4, padding_side="left")([row])
    assert left.input_ids.tolist() == [[9, 5, 6, 7]]
    assert left.targets.tolist() == [[9, 6, 7, 9]]
    assert left.unshift(left.logprobs)[0].tolist() == [0, -1, -2]


def test_without_labels_the_completion_mask_decides_and_without_it_every_token():
    masked = InputFeature(input_ids=[5, 6, 7], completion_mask=[0, 0, 1])
    bare = InputFeature(input_ids=[5, 6, 7])
    assert InputProcessor()([masked, bare]).loss_mask.tolist() == [[0, 1, 0], [1, 1, 0]]


def test_scalar_and_per_token_advantages_and_temperatures_mix():
    rows = [InputFeature(input_ids=[5, 6], advantages=-1, temperature=0.5), InputFeature(input_ids=[5, 6, 7], advantages=[0, 1, 2])]
    batch = InputProcessor()(rows)
    assert batch.advantages.tolist() == [[-1, 0, 0], [1, 2, 0]]
    assert batch.temperature.tolist() == [[0.5, 0.5, 1], [1, 1, 1]]


def test_given_positions_are_kept():
    assert InputProcessor()([InputFeature(input_ids=[5, 6], position_ids=[3, 4])]).position_ids.tolist() == [[3, 4]]


def test_errors_name_the_row_and_the_field():
    one = InputFeature(input_ids=[5, 6], logprobs=[0, -1])
    with pytest.raises(FormatError, match=r"features\[1\] has no logprobs, others of the batch do"):
        InputProcessor()([one, InputFeature(input_ids=[5])])
    with pytest.raises(FormatError, match=r"features\[1\] is a dict, not an InputFeature"):
        InputProcessor()([one, {"input_ids": [5]}])
    with pytest.raises(FormatError, match="the list of features is empty"):
        InputProcessor()([])
    with pytest.raises(FormatError, match=r"batch's shape \(1, 2\), not \(1, 3\)"):
        InputProcessor()([one]).unshift(np.zeros((1, 3)))


@pytest.mark.parametrize(("option", "value"), [("alignment", 0), ("pad_token_id", -100), ("padding_side", "both")])
def test_a_processor_refuses_wrong_options(option, value):
    with pytest.raises(FormatError, match=f"InputProcessor.{option} is"):
        InputProcessor(**{option: value})

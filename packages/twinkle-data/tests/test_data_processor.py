"""InputProcessor: what is shifted where, padding, and the way back."""

# Optional arrays are known to be set here, and wrong types are handed in on purpose.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from twinkle_data import FormatError, InputFeature, InputProcessor, PackedFeature, append_context

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


@pytest.mark.parametrize(("option", "value"), [("alignment", 0), ("sequence_alignment", 0), ("pad_token_id", -100), ("padding_side", "both")])
def test_a_processor_refuses_wrong_options(option, value):
    with pytest.raises(FormatError, match=f"InputProcessor.{option} is"):
        InputProcessor(**{option: value})


# Packed rows and padding-free batches


def packed_rows(draw, rows):
    """The rows, some of them together in packed rows."""
    out, index = [], 0
    while index < len(rows):
        size = draw(st.integers(1, 3))
        part = rows[index : index + size]
        out.append(part[0] if len(part) == 1 else PackedFeature(features=part))
        index += size
    return out


free = st.builds(
    InputProcessor, pad_token_id=st.integers(0, 50), alignment=st.integers(1, 6), sequence_alignment=st.integers(1, 4), padding_free=st.booleans()
)


@settings(deadline=None, max_examples=60)
@given(rows=features(), processor=free, data=st.data())
def test_packed_and_padding_free_batches_give_back_every_field_of_every_sequence(rows, processor, data):
    given_rows = packed_rows(data.draw, rows)
    batch = processor(given_rows)
    plain = InputProcessor(pad_token_id=processor.pad_token_id)(rows)
    assert batch.input_ids.shape[0] == (1 if processor.padding_free else len(given_rows))
    assert batch.input_ids.shape[1] % processor.alignment == batch.input_ids.shape[1] % processor.sequence_alignment == 0
    for name in ("input_ids", "position_ids", "targets", "loss_mask", "temperature", *SHIFTED):
        value, other = getattr(batch, name), getattr(plain, name)
        assert (value is None) == (other is None)
        if value is not None:
            for index, (one, two) in enumerate(zip(batch.split(value), plain.split(other), strict=True)):
                np.testing.assert_array_equal(one, two, f"{name} of sequence {index}")
    for index in range(len(rows)):
        assert (batch.sequence_ids == index).sum() == len(rows[index])
    values = np.random.default_rng(0).normal(size=batch.input_ids.shape)
    unshifted = batch.unshift(values)
    assert list(map(len, unshifted)) == list(map(len, given_rows))
    np.testing.assert_array_equal(np.concatenate(unshifted), np.concatenate(batch.unshift_sequences(values)))
    ids = batch.split_features(batch.input_ids[..., None])
    assert list(map(len, ids)) == list(map(len, given_rows))
    np.testing.assert_array_equal(np.concatenate(ids)[:, 0], np.concatenate([row.input_ids for row in rows]))
    padding = ~batch.valid
    assert not batch.loss_mask[padding].any()
    assert not batch.position_ids[padding].any()


@settings(deadline=None, max_examples=60)
@given(rows=features(), processor=free)
def test_segments_cover_the_batch_and_each_holds_one_sequence_at_its_beginning(rows, processor):
    batch = processor(rows)
    bounds = batch.cu_seq_lens
    assert bounds.dtype == np.int32
    assert bounds[0] == 0
    assert bounds[-1] == batch.input_ids.size
    assert (np.diff(bounds) % processor.sequence_alignment == 0).all() or not processor.padding_free
    flat = batch.sequence_ids.reshape(-1)
    found = []
    for begin, end in pairwise(bounds.tolist()):
        ids = flat[begin:end]
        own = set(ids[ids >= 0].tolist())
        assert len(own) <= 1, "a segment holds two sequences"
        if own:
            (index,) = own
            found.append(index)
            assert (ids[: len(rows[index])] == index).all()
            assert end - begin == batch.spans[index]
    assert found == list(range(len(rows)))
    assert batch.max_length == np.diff(bounds).max()


def test_a_padding_free_row_and_its_four_values():
    rows = [InputFeature(input_ids=[5, 6, 7], temperature=0.5), InputFeature(input_ids=[8, 9], temperature=2)]
    batch = InputProcessor(pad_token_id=1, alignment=4, padding_free=True)(rows)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert batch.targets.tolist() == [[6, 7, 1, 9, 1, 1, 1, 1]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 0, 0, 0, 0]]
    assert batch.temperature.tolist() == [[0.5, 0.5, 0.5, 2, 2, 1, 1, 1]]
    assert batch.sequence_ids.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1]]
    values = batch.flash_attention_kwargs()
    assert values["cu_seq_lens_q"].tolist() == values["cu_seq_lens_k"].tolist() == [0, 3, 5, 8]
    assert values["max_length_q"] == values["max_length_k"] == 3
    assert batch.is_packed
    with pytest.raises(FormatError, match="a batch of 2 rows is not padding-free"):
        InputProcessor()(rows).flash_attention_kwargs()


@pytest.mark.parametrize(("degree", "zigzag"), [(2, 1), (3, 1), (4, 1), (2, 4), (4, 8)])
def test_packed_rows_divide_evenly_among_sequence_parallel_ranks(degree, zigzag):
    rows = [InputFeature(input_ids=np.ones(n, int)) for n in (3, 7, 5, 1)]
    batch = InputProcessor(alignment=degree, sequence_alignment=zigzag, padding_free=True)([PackedFeature(features=rows[:3]), rows[3]])
    assert batch.input_ids.shape[1] % degree == 0
    assert (np.diff(batch.cu_seq_lens) % zigzag == 0).all()
    shards = np.split(batch.input_ids, degree, axis=1)
    assert len({shard.shape for shard in shards}) == 1
    np.testing.assert_array_equal(np.concatenate(batch.split(batch.input_ids)), np.ones(16))


def test_positions_with_several_axes_are_kept_and_text_beside_them_gets_them_too():
    image = InputFeature(input_ids=[5, 6, 7], position_ids=[[0, 0, 1], [0, 1, 1], [0, 0, 1]])
    text = InputFeature(input_ids=[8, 9])
    batch = InputProcessor(padding_free=True, alignment=4)([image, text])
    assert batch.position_ids.shape == (3, 1, 8)
    assert batch.position_ids[:, 0].tolist() == [[0, 0, 1, 0, 1, 0, 0, 0], [0, 1, 1, 0, 1, 0, 0, 0], [0, 0, 1, 0, 1, 0, 0, 0]]
    assert InputProcessor()([image, text]).position_ids.shape == (3, 2, 3)
    assert PackedFeature(features=[image, text]).position_ids.shape == (3, 5)
    longer = append_context(image, [1, 2])
    assert longer.position_ids[:, 3:].tolist() == [[2, 3]] * 3
    with pytest.raises(FormatError, match="position_ids of 2 axes, others of 3"):
        InputProcessor()([image, InputFeature(input_ids=[5], position_ids=[[0], [0]])])
    with pytest.raises(FormatError, match=r"position_ids has shape \(3, 2\), input_ids has \(3,\)"):
        InputFeature(input_ids=[5, 6, 7], position_ids=[[0, 0]] * 3)


def test_position_ids_that_begin_anew_are_several_sequences():
    row = InputFeature(input_ids=[5, 6, 7, 8], position_ids=[0, 1, 0, 1], logprobs=[0, -1, -2, -3], temperature=0.5)
    batch = InputProcessor(padding_free=True)([row])
    assert batch.cu_seq_lens.tolist() == [0, 2, 4]
    assert batch.loss_mask.tolist() == [[1, 0, 1, 0]]
    assert batch.logprobs.tolist() == [[-1, 0, -3, 0]]
    (unshifted,) = batch.unshift(batch.logprobs)
    assert unshifted.tolist() == [0, -1, 0, -3]


@pytest.mark.parametrize("options", [{"padding_free": True}, {"sequence_alignment": 2}])
def test_padding_on_the_left_is_for_plain_rows(options):
    with pytest.raises(FormatError, match="padding_side is 'left'; padding-free rows"):
        InputProcessor(padding_side="left", **options)


def test_targets_of_their_own_take_the_place_of_the_tokens_that_follow():
    own = InputFeature(input_ids=[1, 2, 3], targets=[9, 8, 7])
    plain = InputFeature(input_ids=[4, 5, 6])
    batch = InputProcessor(pad_token_id=0)([own, plain])
    np.testing.assert_array_equal(batch.targets, [[8, 7, 0], [5, 6, 0]])
    np.testing.assert_array_equal(batch.input_ids, [[1, 2, 3], [4, 5, 6]])
    with pytest.raises(FormatError, match=r"targets\[1\] is negative"):
        InputFeature(input_ids=[1, 2], targets=[1, -100])
    with pytest.raises(FormatError, match="targets has shape"):
        InputFeature(input_ids=[1, 2], targets=[1])

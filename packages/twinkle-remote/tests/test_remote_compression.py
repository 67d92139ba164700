"""Compression of what travels between nodes."""

# pyright: reportArgumentType=false

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("ray")
pytest.importorskip("zstandard")

import twinkle_remote as tr
from twinkle_mesh import DeviceMesh
from twinkle_remote import _ray_sending, _shards
from twinkle_remote._dispatch import share_out
from twinkle_remote._packing import Packed, pack_apart
from twinkle_remote._protocol import MethodSpec
from twinkle_remote._ray_wire import read, unpack_arguments

SPEC = MethodSpec(
    name="m",
    parameters=("x",),
    dispatch="slice_dp",
    execute="all",
    collect="flatten",
    sync=False,
    lazy_collect=True,
    timeout_s=None,
    allow_empty=False,
)


def sent(batch, compress_above_bytes, far_ranks):
    mesh = DeviceMesh.from_sizes(dp_size=2)
    sender = _ray_sending.Sender(SPEC, 1.0, (), compress_above_bytes, far_ranks, share_out(SPEC, (batch,), {}, 2, mesh))
    return [sender.objects(rank)[0] for rank in range(2)]


def test_only_what_goes_to_another_node_is_compressed_and_only_above_the_size():
    batch = np.arange(100_000, dtype=np.int64) % 50
    plain, packed = sent(batch, 1000, frozenset({1}))
    assert isinstance(plain, Packed)
    assert isinstance(packed, Packed)
    assert plain.codec is None
    assert packed.codec == "zstd"
    assert packed.size_bytes < plain.size_bytes / 8
    message, _ = read(packed, [])
    np.testing.assert_array_equal(unpack_arguments(message)[0][0], batch[50_000:])
    # The controls: no compression without the option, none below the size, none for a worker on this node.
    assert [message.codec for message in sent(batch, None, frozenset({1}))] == [None, None]
    assert [message.codec for message in sent(batch, 1 << 20, frozenset({1}))] == [None, None]
    assert [message.codec for message in sent(batch, 1000, frozenset())] == [None, None]


def test_results_are_compressed_above_the_size(monkeypatch):
    stored = []
    monkeypatch.setattr(_shards.ray, "put", stored.append)
    value = [np.zeros(10_000), "text" * 1000]
    for above in (1000, None, 1 << 20):
        _shards.keep(value, None, None, (), 0.0, 0.0, None, above)
    assert [packed.codec for packed in stored] == ["zstd", None, None]
    for packed in stored:
        array, text = packed.unpack()
        assert (array.sum(), text) == (0.0, "text" * 1000)
    assert stored[0].size_bytes < stored[1].size_bytes / 10


def test_tensors_and_objects_survive_compression():
    torch = pytest.importorskip("torch")
    value = {"t": torch.arange(1000.0), "half": torch.ones(300, dtype=torch.bfloat16), "o": {"a": [1, None]}}
    back = pack_apart(value).compressed().unpack()
    assert torch.equal(back["t"], value["t"])
    assert torch.equal(back["half"], value["half"])
    assert back["o"] == value["o"]
    back["t"] += 1  # a copy


def test_unknown_codecs_and_sizes_are_refused_at_once():
    with pytest.raises(tr.RemoteTypeError, match="known are None and 'zstd'"):
        tr.initialize("local", compress="gzip")
    with pytest.raises(tr.RemoteTypeError, match="compress_above_bytes=-1"):
        tr.initialize("local", compress="zstd", compress_above_bytes=-1)


def test_without_zstandard_the_error_names_the_install_line():
    code = """
import sys
sys.modules["zstandard"] = None  # an import of it now fails as if it were not installed
import twinkle_remote
try:
    twinkle_remote.initialize("ray", compress="zstd")
except twinkle_remote.MissingCompressionError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert "pip install 'twinkle-remote[compress]'" in done.stdout

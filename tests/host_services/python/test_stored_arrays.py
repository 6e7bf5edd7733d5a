"""Tests of arrays in storage: two hosts write their shards, and other hosts read the parts that they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from atoll.errors import Code, StatusError
from atoll.host_services.python.program import stored_arrays
from atoll.host_services.python.program.stored_arrays import reading, writing
from atoll.ir.types import Replicated, Sharding, Tiled, Tiling, shard_boxes
from atoll.protocol.messages import python_messages as m

HOSTS = ((0, 1), (2, 3))
ROWS, COLUMNS = Tiled((4, 1), (0, 1, 2, 3)), Tiled((1, 2, 2), (0, 1, 2, 3))
TIMEOUT = 30.0


def part(whole: np.ndarray[Any, Any], box: Any) -> np.ndarray[Any, Any]:
    return np.array(whole[tuple(slice(*each) for each in box)])


def stored(
    directory: Path, name: str, tiling: Tiling, shape: tuple[int, ...] = (8, 8), dtype: str = ""
) -> m.StoredArray:
    return m.StoredArray(str(directory), name, shape, Sharding((0, 1, 2, 3), tiling), dtype)


class Held:
    """Arguments of a call whose shards are all here. Records how many were requested and not yet taken."""

    def __init__(self, shards: list[list[np.ndarray[Any, Any]]]) -> None:
        self._shards = shards
        self.asked: list[tuple[int, int]] = []
        self.taken = 0
        self.limit = 0

    def ask(self, argument: m.Argument, shard: int) -> None:
        self.asked.append((argument.position, shard))
        self.limit = max(self.limit, len(self.asked) - self.taken)

    def take(self, argument: m.Argument, shard: int) -> np.ndarray[Any, Any]:
        assert (argument.position, shard) in self.asked
        self.taken += 1
        return self._shards[argument.position][shard]


def write(
    arrays: dict[m.StoredArray, np.ndarray[Any, Any]], hosts: Any = HOSTS, timeout: float = TIMEOUT
) -> list[Held]:
    """Let each host write its shards."""
    asked = []
    source = m.WriteArrays("write", tuple(arrays), timeout)
    for host in hosts:
        arguments, shards = [], []
        for position, (array, whole) in enumerate(arrays.items()):
            boxes = shard_boxes(array.sharding, array.shape)
            local = [part(whole, boxes[device]) for device in array.sharding.devices if device in host]
            arguments.append(m.Argument(position, whole.dtype.name, local[0].shape, tuple(range(len(local)))))
            shards.append(local)
        asked.append(Held(shards))
        assert writing(source, host)(m.Call(1, "f", 0, tuple(arguments), (), asks=True), asked[-1]) == []
    return asked


def read(*arrays: m.StoredArray, host: tuple[int, ...] = HOSTS[0]) -> list[list[np.ndarray[Any, Any]]]:
    return reading(m.ReadArrays("read", arrays, TIMEOUT), host)(m.Call(1, "f", 0, (), tuple(range(len(arrays)))), [])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "uint32"])
def test_what_two_hosts_wrote_is_read_with_another_sharding(tmp_path: Path, dtype: str):
    whole = np.arange(64).reshape(8, 8).astype(getattr(ml_dtypes, dtype, dtype))
    write({stored(tmp_path, "a", ROWS): whole})
    for host in HOSTS:
        boxes = shard_boxes(stored(tmp_path, "a", COLUMNS).sharding, (8, 8))
        (shards,) = read(stored(tmp_path, "a", COLUMNS, dtype=dtype), host=host)
        for device, shard in zip(host, shards, strict=True):
            np.testing.assert_array_equal(shard, part(whole, boxes[device]))


def test_each_host_writes_only_chunks_that_nobody_else_writes(tmp_path: Path):
    whole = np.arange(64.0).reshape(8, 8)
    array = stored(tmp_path, "a", ROWS)
    write({array: whole}, hosts=[HOSTS[1]])
    assert sorted(each.name for each in (tmp_path / "a").iterdir()) == [".zarray", "2.0", "3.0"]


def test_copies_of_a_shard_are_written_once_by_the_hosts_in_turn(tmp_path: Path):
    arrays = {stored(tmp_path, f"a{i}", Replicated()): np.full((8, 8), i, np.float32) for i in range(4)}
    write(arrays, hosts=[HOSTS[0]])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a0", "a1"]
    write(arrays, hosts=[HOSTS[1]])
    for array, whole in arrays.items():
        ((shard, copy),) = read(stored(tmp_path, array.name, Replicated(), dtype="float32"))
        np.testing.assert_array_equal(shard, whole)
        np.testing.assert_array_equal(copy, whole)


def test_no_more_is_asked_for_than_the_window_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stored_arrays, "WINDOW_BYTES", 2 * 2 * 8 * 8)  # two shards
    arrays = {stored(tmp_path, f"a{i}", ROWS): np.full((8, 8), float(i)) for i in range(5)}
    (host, _) = write(arrays)
    assert (len(host.asked), host.limit) == (10, 2)
    assert read(stored(tmp_path, "a4", ROWS, dtype="float64"))[0][1].sum() == 64


def test_a_shard_beyond_the_window_is_asked_for_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stored_arrays, "WINDOW_BYTES", 1)
    (host, _) = write({stored(tmp_path, "a", ROWS): np.ones((8, 8))})
    assert (len(host.asked), host.limit) == (2, 1)


def test_of_copies_only_those_that_are_written_are_asked_for(tmp_path: Path):
    first, second = write({stored(tmp_path, "a", Replicated()): np.ones((8, 8))})
    assert (first.asked, second.asked) == ([(0, 0)], [])


def test_orbax_finds_an_array_of_its_own_format(tmp_path: Path):
    import tensorstore

    write({stored(tmp_path, "layer.w", ROWS): np.zeros((8, 8), ml_dtypes.bfloat16)})
    place = {"driver": "file", "path": f"{tmp_path}/layer.w"}
    store = tensorstore.open({"driver": "zarr", "kvstore": place, "fill_missing_data_reads": False}).result()
    assert (store.dtype.name, store.shape, store.chunk_layout.write_chunk.shape) == ("bfloat16", (8, 8), (2, 8))
    assert store.read().result().sum() == 0  # zeros are also stored


def test_an_array_is_read_as_the_dtype_that_is_asked_for(tmp_path: Path):
    write({stored(tmp_path, "a", ROWS): np.arange(64.0).reshape(8, 8)})
    ((shard, _),) = read(stored(tmp_path, "a", ROWS, dtype="bfloat16"))
    assert (shard.dtype.name, float(shard[0, 5])) == ("bfloat16", 5.0)


def test_scalars_and_empty_arrays_come_back(tmp_path: Path):
    arrays = {
        stored(tmp_path, "scalar", Replicated(), ()): np.array(7, np.int32),
        stored(tmp_path, "empty", Replicated(), (0, 4)): np.zeros((0, 4), np.float32),
    }
    write(arrays)
    (scalar, _), (empty, _) = read(
        stored(tmp_path, "scalar", Replicated(), (), "int32"),
        stored(tmp_path, "empty", Replicated(), (0, 4), "float32"),
    )
    assert (int(scalar), empty.shape) == (7, (0, 4))


def test_what_was_not_written_whole_is_an_error_and_no_zeros(tmp_path: Path):
    write({stored(tmp_path, "a", ROWS): np.ones((8, 8))}, hosts=[HOSTS[1]])
    with pytest.raises(StatusError, match="cannot read 'a' at") as caught:
        read(stored(tmp_path, "a", ROWS, dtype="float64"))
    assert caught.value.status.code == Code.NOT_FOUND


@pytest.mark.parametrize(
    ("name", "shape", "code", "text"),
    [
        ("b", (8, 8), Code.NOT_FOUND, "cannot read 'b' at"),
        ("a", (8, 4), Code.INVALID_ARGUMENT, r"has the shape \[8, 8\], but the request is for \[8, 4\]"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_place(tmp_path: Path, name: str, shape: Any, code: Code, text: str):
    write({stored(tmp_path, "a", ROWS): np.ones((8, 8))})
    with pytest.raises(StatusError, match=text) as caught:
        read(stored(tmp_path, name, Replicated(), shape, "float64"))
    assert caught.value.status.code == code


def test_a_place_where_nobody_may_write_is_an_error_that_names_it(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StatusError, match=r"cannot write 'a' at .*/file: .*Not a directory"):
        write({stored(tmp_path / "file", "a", ROWS): np.ones((8, 8))})


def test_a_request_ends_with_its_timeout(tmp_path: Path):
    with pytest.raises(StatusError, match="not within the request's timeout of 0 s") as caught:
        write({stored(tmp_path, "a", ROWS): np.ones((8, 8))}, timeout=0.0)
    assert caught.value.status.code == Code.DEADLINE_EXCEEDED

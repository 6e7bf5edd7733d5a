"""`atoll.data` where the pipelines run in the script's own process: on stock JAX, with 8 CPU devices."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from atoll.data import Batches, BatchIterator, Shard

pytestmark = pytest.mark.slow

_read: list[int] = []  # the batches that `counted` has made


def sharded(*axes: str | None) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")), PartitionSpec(*axes))


def numbers(shard: Shard, count: int = 5) -> list[np.ndarray[Any, Any]]:
    return [np.arange(8) + 100 * i for i in range(count)]


def first_rows(batches: Any) -> list[int]:
    return [int(batch[0]) for batch in batches]


def test_a_batch_is_a_global_array_with_the_sharding_that_was_asked_for():
    (batch,) = Batches([np.arange(16).reshape(8, 2)], sharded("x", "y"))
    assert batch.sharding == sharded("x", "y")
    assert batch.tolist() == np.arange(16).reshape(8, 2).tolist()


def test_a_single_device_is_a_sharding_too():
    (batch,) = Batches([np.arange(3)], SingleDeviceSharding(jax.devices()[3]))
    assert batch.devices() == {jax.devices()[3]}


def test_batches_are_pytrees_and_shardings_a_prefix_of_them():
    source = [{"image": {"pixels": np.ones((8, 4), np.float32)}, "label": np.arange(8, dtype=np.int32)}]
    (batch,) = Batches(source, {"image": sharded("x", "y"), "label": sharded("x")})
    assert batch["image"]["pixels"].sharding == sharded("x", "y")
    assert batch["label"].sharding == sharded("x")
    assert (batch["image"]["pixels"].dtype, batch["label"].dtype) == (np.float32, np.int32)


def test_it_ends_and_stays_ended():
    iterator = iter(Batches(numbers, sharded("x")))
    assert first_rows(iterator) == [0, 100, 200, 300, 400]
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_pipeline_without_batches_ends_at_once():
    assert list(Batches(lambda shard: [], sharded("x"))) == []


def test_each_iteration_begins_anew():
    batches = Batches(numbers, sharded("x"))
    assert [first_rows(batches) for _ in range(2)] == [[0, 100, 200, 300, 400]] * 2


# ---- state


def of_map_dataset(shard: Shard) -> Any:
    source = grain.MapDataset.range(64).seed(7).shuffle().repeat(2)
    return source[shard.index :: shard.count].batch(8)


def of_iter_dataset(shard: Shard) -> Any:
    source = grain.MapDataset.range(96).to_iter_dataset().filter(lambda x: x % 3 != 0)
    return grain.experimental.WindowShuffleIterDataset(source, window_size=16, seed=3).batch(8)


def of_data_loader(shard: Shard) -> Any:
    sampler = grain.samplers.IndexSampler(64, grain.sharding.NoSharding(), shuffle=True, seed=5, num_epochs=1)
    operations = [grain.transforms.Batch(8, drop_remainder=True)]
    return grain.DataLoader(data_source=list(range(64)), sampler=sampler, operations=operations)


def of_generator(shard: Shard) -> Iterator[Any]:
    yield from numbers(shard, 8)


def rest(iterator: BatchIterator) -> list[list[int]]:
    return [batch.tolist() for batch in iterator]


@pytest.mark.parametrize(
    ("pipeline", "taken"),
    [
        *((pipeline, taken) for pipeline in (of_map_dataset, of_generator) for taken in (0, 3, 8)),
        *((pipeline, 3) for pipeline in (of_iter_dataset, of_data_loader)),
        *(
            pytest.param(pipeline, taken, marks=pytest.mark.thorough)
            for pipeline in (of_iter_dataset, of_data_loader)
            for taken in (0, 8)
        ),
    ],
)
def test_a_restored_iterator_goes_on_with_exactly_the_next_batch(pipeline: Callable[[Shard], Any], taken: int):
    batches = Batches(pipeline, sharded("x"), prefetch=3)
    iterator = iter(batches)
    for _ in range(taken):
        next(iterator)
    restored = iter(batches)
    restored.set_state(iterator.get_state())
    assert rest(restored) == rest(iterator) == rest(iter(batches))[taken:]


def test_the_restored_iterator_has_the_state_that_it_was_given():
    iterator = iter(Batches(of_map_dataset, sharded("x")))
    next(iterator)
    state = iterator.get_state()
    iterator.set_state(state)
    assert iterator.get_state() == state
    iterator.start_prefetch()
    assert iterator.get_state() == state


def test_an_iterator_that_is_set_back_forgets_what_it_had_read_ahead():
    iterator = iter(Batches(numbers, sharded("x")))
    state = iterator.get_state()
    assert first_rows(iterator) == [0, 100, 200, 300, 400]
    iterator.set_state(state)
    assert first_rows(iterator) == [0, 100, 200, 300, 400]


def test_orbax_saves_and_restores_it_as_an_iterator_of_grain(tmp_path: Path):
    import orbax.checkpoint as ocp

    batches = Batches(of_map_dataset, sharded("x"))
    iterator = iter(batches)
    next(iterator)
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        manager.save(1, args=ocp.args.Composite(input=grain.checkpoint.CheckpointSave(iterator)))
        expected = rest(iterator)
        restored = iter(batches)
        manager.restore(1, args=ocp.args.Composite(input=grain.checkpoint.CheckpointRestore(restored)))
    assert rest(restored) == expected


def test_a_state_of_something_else_is_refused():
    iterator = iter(Batches(numbers, sharded("x")))
    for state in (b"", b"[]", b"{}", json.dumps({"format": "atoll.data 9", "batches": 1, "shards": []}).encode()):
        with pytest.raises(ValueError, match=r"not the state of an iterator of atoll\.data"):
            iterator.set_state(state)


def test_a_state_of_another_pipeline_is_refused():
    other = iter(Batches(of_map_dataset, sharded("x")))
    next(other)
    iterator = iter(Batches(numbers, sharded("x")))
    iterator.set_state(other.get_state())
    with pytest.raises(ValueError, match="of another kind of iterator"):
        next(iterator)


def test_a_state_of_more_shards_is_refused():
    iterator = iter(Batches(numbers, sharded("x")))
    next(iterator)
    state = json.loads(iterator.get_state())
    iterator.set_state(json.dumps(state | {"shards": state["shards"] * 2}).encode())
    with pytest.raises(ValueError, match="a state of 2 shards, but the sharding has 1"):
        next(iterator)


class WithLargeState:
    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> WithLargeState:
        return self

    def __next__(self) -> np.ndarray[Any, Any]:
        self.count += 1
        return np.arange(8)

    def get_state(self) -> dict[str, Any]:
        return {"count": np.int64(self.count), "seen": "x" * 20_000}

    def set_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_a_state_without_room_is_refused_when_it_is_asked_for_and_no_earlier():
    iterator = iter(Batches(lambda shard: WithLargeState(), sharded("x")))
    next(iterator)
    with pytest.raises(ValueError, match=r"takes 20\d+ bytes, but the limit is 16384.*state_bytes"):
        iterator.get_state()
    iterator = iter(Batches(lambda shard: WithLargeState(), sharded("x"), state_bytes=20_100))
    next(iterator)
    assert json.loads(iterator.get_state())["shards"][0]["json"]["count"] == 1


# ---- reading ahead


def counted(shard: Shard) -> Iterator[Any]:
    for i in range(100):
        _read.append(i)
        yield np.full(8, i)


@pytest.mark.parametrize("prefetch", [1, 4])
def test_no_more_is_read_ahead_than_was_asked_for(prefetch: int):
    _read.clear()
    iterator = iter(Batches(counted, sharded("x"), prefetch=prefetch))
    assert _read == []
    iterator.start_prefetch()
    assert len(_read) == prefetch
    for taken in range(1, 4):
        assert int(next(iterator)[0]) == taken - 1
        assert len(_read) == taken + prefetch


def test_batches_of_several_threads_are_each_taken_once_and_in_order():
    iterator = iter(Batches(counted, sharded("x")))
    taken: list[list[int]] = [[] for _ in range(4)]

    def take(mine: list[int]) -> None:
        for _ in range(10):
            mine.append(int(next(iterator)[0]))

    threads = [threading.Thread(target=take, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for mine in taken for number in mine) == list(range(40))
    assert all(mine == sorted(mine) for mine in taken)


def test_a_closed_iterator_says_so_until_it_is_set_anew():
    iterator = iter(Batches(numbers, sharded("x")))
    next(iterator)
    iterator.close()
    with pytest.raises(ValueError, match="has been closed"):
        next(iterator)
    iterator.set_state(iterator.get_state())
    assert first_rows(iterator) == [100, 200, 300, 400]


# ---- what cannot be


def fails_at_the_third(shard: Shard) -> Iterator[Any]:
    yield from numbers(shard, 2)
    raise KeyError("the third batch")


def test_an_error_of_the_pipeline_comes_in_its_turn_and_stays():
    iterator = iter(Batches(fails_at_the_third, sharded("x"), prefetch=3))
    assert [int(next(iterator)[0]) for _ in range(2)] == [0, 100]
    for _ in range(2):
        with pytest.raises(KeyError, match="the third batch"):
            next(iterator)


def test_an_error_in_the_function_is_raised_by_the_first_batch():
    def pipeline(shard: Shard) -> Any:
        raise FileNotFoundError("/data/is/not/here")

    with pytest.raises(FileNotFoundError, match="/data/is/not/here"):
        next(iter(Batches(pipeline, sharded("x"))))


def test_a_short_last_batch_is_an_error_that_says_how_grain_leaves_it_out():
    whole = grain.MapDataset.range(20)
    iterator = iter(Batches(whole.batch(8), sharded("x")))
    assert len([next(iterator), next(iterator)]) == 2
    with pytest.raises(ValueError, match=r"is batch int64\[4\].* batch int64\[8\].*drop_remainder"):
        next(iterator)
    assert len(list(Batches(whole.batch(8, drop_remainder=True), sharded("x")))) == 2


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"epoch": 3}, r"batch\['epoch'\] is a scalar"),
        ({"text": np.array(["a"] * 8)}, r"batch\['text'\] is of dtype <U1"),
        ({}, "a batch without arrays"),
        (np.arange(7), "7"),
    ],
)
def test_a_batch_that_no_device_holds_is_refused_by_name(batch: Any, text: str):
    with pytest.raises((ValueError, TypeError), match=text):
        next(iter(Batches([batch], sharded("x"))))


def test_what_cannot_be_asked_for_is_refused_at_once():
    with pytest.raises(ValueError, match="prefetch=0"):
        Batches(numbers, sharded("x"), prefetch=0)
    with pytest.raises(TypeError, match="NamedSharding"):
        Batches(numbers, PartitionSpec("x"))
    with pytest.raises(TypeError, match="a generator cannot be sent to the hosts: pass a function"):
        Batches((batch for batch in [np.ones(8)]), sharded("x"))

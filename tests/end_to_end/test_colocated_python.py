"""Tests of colocated Python: the user's functions and classes that run on the hosts."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import colocated_python
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.end_to_end.remote_python import RemotePython, StartPython


@pytest.fixture(scope="module")
def python(start_python: StartPython) -> RemotePython:
    """Return a child with one island of two hosts, with two devices each."""
    return start_python("1x2x2")


def sharded(spec: Any = "x") -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec(spec))


def call_with_process_numbers() -> Any:
    @colocated_python.colocated_python
    def numbers(x: jax.Array) -> jax.Array:
        index, count = jax.process_index(), jax.process_count()
        shards = [jax.device_put(np.full(2, 10 * count + index), shard.device) for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

    return jax.device_get(numbers(jax.device_put(np.zeros(8, np.int64), sharded())))


def test_each_host_runs_its_own_part_in_one_jax_program(python: RemotePython):
    assert python.call(call_with_process_numbers).tolist() == [20, 20, 20, 20, 21, 21, 21, 21]


def devices_beside_the_last() -> bool:
    last, *others = reversed(jax.devices())
    return list(colocated_python.colocated_cpu_devices((last, *others))) == [last, *others]


def test_a_cpu_device_is_beside_itself(python: RemotePython):
    assert python.call(devices_beside_the_last)


def call_on_the_second_host() -> Any:
    @colocated_python.colocated_python
    def double(x: jax.Array) -> jax.Array:
        assert jax.process_index() == 1
        return x * 2

    return jax.device_get(double(jax.device_put(np.arange(3), jax.devices()[3])))


def test_a_function_runs_where_its_arguments_are(python: RemotePython):
    assert python.call(call_on_the_second_host).tolist() == [0, 2, 4]


def use_module_of_the_user(directory: str) -> Any:
    sys.path.insert(0, directory)
    import a_module_of_the_user  # type: ignore[import-not-found]

    @colocated_python.colocated_python
    def through(x: jax.Array) -> jax.Array:
        return jax.device_put(a_module_of_the_user.triple(np.asarray(x)), x.sharding)

    try:
        return jax.device_get(through(jax.device_put(np.arange(3), jax.devices()[0])))
    finally:
        sys.path.remove(directory)


def test_modules_on_the_users_path_are_found(python: RemotePython, module_directory: Path):
    directory = module_directory / "modules"
    directory.mkdir()
    (directory / "a_module_of_the_user.py").write_text("def triple(x): return 3 * x\n")
    assert python.call(use_module_of_the_user, str(directory)).tolist() == [0, 3, 6]


def go_on_while_python_sleeps() -> tuple[bool, int]:
    @colocated_python.colocated_python
    def wait(x: jax.Array) -> jax.Array:
        time.sleep(1.5)
        return x + 1

    wait = wait.specialize(out_specs_fn=lambda x: x)
    x = jax.device_put(np.array(1), jax.devices()[0])
    double = jax.jit(lambda x: x * 2)
    jax.block_until_ready((wait(x), double(x)))
    late = wait(x)
    dependent = double(late)
    jax.block_until_ready(double(x))
    was_pending = not late.is_ready()
    return was_pending, int(dependent)


def test_a_function_that_takes_long_holds_up_only_what_needs_it(python: RemotePython):
    assert python.call(go_on_while_python_sleeps) == (True, 4)


def meet_in_streams() -> int:
    @colocated_python.colocated_python
    def make(x: jax.Array) -> jax.Array:
        colocated_python.barrier = threading.Barrier(3)
        return x

    @colocated_python.colocated_python
    def meet(x: jax.Array) -> jax.Array:
        colocated_python.barrier.wait(10)
        return x + 1

    x = jax.device_put(np.array(1), jax.devices()[0])
    jax.block_until_ready(make(x))
    meet = meet.specialize(out_specs_fn=lambda x: x)
    results = [0] * 3
    threads = [threading.Thread(target=lambda i=i: results.__setitem__(i, int(meet(x)))) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(results)


def test_calls_of_different_threads_run_at_the_same_time(python: RemotePython):
    assert python.call(meet_in_streams) == 6


def count_in_an_object() -> list[int]:
    @colocated_python.colocated_python_class
    class Counter:
        def __init__(self, start: int) -> None:
            self.count = start

        def next(self, x: jax.Array) -> jax.Array:
            self.count += 1
            return jax.device_put(np.array(self.count), x.sharding)

    x = jax.device_put(np.array(1), jax.devices()[0])
    seen = []
    for start in (0, 10):
        counter = Counter(start)
        seen += [int(counter.next(x)) for _ in range(3)]
    return seen


def test_an_object_lives_on_its_host_between_calls(python: RemotePython):
    assert python.call(count_in_an_object) == [1, 2, 3, 11, 12, 13]


def raise_on_the_host() -> str:
    @colocated_python.colocated_python
    def fail(x: jax.Array) -> jax.Array:
        raise KeyError("no such thing")

    try:
        jax.block_until_ready(fail(jax.device_put(np.array(1), jax.devices()[0])))
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


def test_an_exception_comes_back_with_its_traceback(python: RemotePython):
    text = python.call(raise_on_the_host)
    assert text.startswith("INTERNAL: a Python function on the host raised:\nTraceback")
    assert "in fail" in text
    assert "KeyError: 'no such thing'" in text
    assert "host_services/python/program" not in text


def fail_to_read_a_file() -> tuple[str, list[int], int]:
    @colocated_python.colocated_python
    def read(x: jax.Array) -> jax.Array:
        os.listdir("/there/is/none")
        return x

    @colocated_python.colocated_python
    def say_much(x: jax.Array) -> jax.Array:
        raise ValueError("x" * (8 << 20))

    @colocated_python.colocated_python
    def same(x: jax.Array) -> jax.Array:
        return x

    x = jax.device_put(np.arange(len(jax.devices())), sharded())
    texts = []
    for function in (read, say_much):
        try:
            jax.block_until_ready(function(x))
        except jax.errors.JaxRuntimeError as error:
            texts.append(str(error))
    return texts[0], jax.device_get(same(x)).tolist(), len(texts[1])


def test_a_function_that_raises_whatever_it_likes_fails_its_call_alone(python: RemotePython):
    text, after, length = python.call(fail_to_read_a_file)
    assert "FileNotFoundError" in text
    assert after == list(range(len(after)))
    assert length < 1 << 20


def donate_what_python_reads() -> tuple[list[float], float]:
    @colocated_python.colocated_python
    def last(x: jax.Array) -> jax.Array:
        shards = [jax.device_put(shard.data[-1:], shard.device) for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays((1,), x.sharding, shards)

    whole = sharded(None)
    last = last.specialize(out_specs_fn=lambda x: jax.ShapeDtypeStruct((1,), np.float32, sharding=whole))
    add = jax.jit(lambda x: x + 1)
    step = jax.jit(lambda x: x * 2, donate_argnums=0)
    x = jax.device_put(np.zeros(1 << 24, np.float32), whole)
    jax.block_until_ready(last(x))
    x = add(x)  # of a function on both hosts
    seen, after = [last(x) for _ in range(4)], step(x)  # reading 64 MB four times takes longer than starting a step
    assert x.is_deleted()
    return [float(each[0]) for each in seen], float(after[-1])


def test_an_argument_can_be_donated_while_it_is_read(python: RemotePython):
    assert python.call(donate_what_python_reads) == ([1.0] * 4, 2.0)


def large_through() -> bool:
    @colocated_python.colocated_python
    def same(x: jax.Array) -> jax.Array:
        return x

    x = jax.device_put(np.arange(1 << 21), sharded())
    return bool((jax.device_get(same(x)) == np.arange(1 << 21)).all())


def test_large_arrays_pass_unchanged(python: RemotePython):
    assert python.call(large_through)

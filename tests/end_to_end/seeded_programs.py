"""Random programs of JAX operations, for a child on Atoll and for a process on stock JAX.

A program makes arrays on random devices, computes with them, donates and reshards them, calls Python that may fail on
one device, and reads them in all ways, at once or in threads. Stock JAX does not run calls that fail, since its other
devices may wait for the one that fails. The program knows which values depend on them.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

SHAPES = ((8,), (8,), (8, 4), (4096,), (304, 240))
DEVICES = 4
ORDERS = ((0, 1, 2, 3), (0, 3), (3, 1), (2, 3))  # of the devices of meshes
READ_SECONDS = 120.0
MAX_VALUES = 10

# A device, or the devices of a mesh with the dimension that they divide. With -1, each has the whole array.
Place = int | tuple[tuple[int, ...], int]


@dataclass(eq=False)
class Value:
    """An array of int32. If it depends on a call that fails, `failure` names the call, and there may be no array.

    An array is `shared` if a thread reads it, or if another array may have its memory. It is not donated then.
    """

    array: Any
    place: Place
    shape: tuple[int, ...]
    failure: str = ""
    shared: bool = False


def _spec(place: Place) -> P:
    return P() if isinstance(place, int) or place[1] < 0 else P(*(None,) * place[1], "x")


def _mesh(order: tuple[int, ...]) -> Mesh:
    return Mesh(np.array(jax.devices())[list(order)], ("x",))


def _sharding(place: Place) -> Any:
    if isinstance(place, int):
        return SingleDeviceSharding(jax.devices()[place])
    return NamedSharding(_mesh(place[0]), _spec(place))


def _called(x: Any, number: Any, position: Any) -> Any:
    """Fail on one device, later than the call ends on others. `number` has the number of the call and the position."""
    if int(position) == number[1]:
        time.sleep(0.01)
        raise ValueError(f"call {number[0]} fails")
    return np.asarray(x) + 7


def _loop(x: Any) -> Any:
    count = abs(x.reshape(-1)[0]) % 7
    y = lax.while_loop(lambda s: s[0] < count, lambda s: (s[0] + 1, s[1] * 3 + s[0]), (jnp.int32(0), x))[1]
    return lax.cond(y.sum() % 2 == 0, lambda z: z + 1, lambda z: -z, y)


COMPUTATIONS: tuple[Callable[[Any], Any], ...] = (
    *(lambda x: x * 3 + 1, lambda x: jnp.where(x > 3, x, -x), jnp.flip, lambda x: x - x.sum(dtype=x.dtype), _loop),
)


class Program:
    """The program of a seed. With `fails`, it runs calls that fail."""

    def __init__(self, seed: int, fails: bool) -> None:
        self._rng = random.Random(seed)
        self._fails = fails
        self._values: list[Value] = []
        self._results: list[Any] = []
        self._threads: list[threading.Thread] = []
        self._jits: dict[Any, Any] = {}
        self._calls = 0

    def run(self, steps: int) -> list[Any]:
        """Return the contents that were read, in the order of the reads, or the name of the call that failed."""
        for _ in range(steps):
            self._rng.choice(self.steps)(self)
            del self._values[:-MAX_VALUES]
        for value in self._values:
            self._read(value)
        for thread in self._threads:
            thread.join(READ_SECONDS)
        return self._results

    # ---- steps

    def put(self) -> None:
        shape = self._rng.choice(SHAPES)
        content = np.random.default_rng(self._rng.randrange(1 << 30)).integers(-50, 50, shape).astype(np.int32)
        place = self._place(shape)
        self._values.append(Value(jax.device_put(content, _sharding(place)), place, shape))

    def compute(self) -> None:
        for value in self._some():
            self._run(value, self._rng.randrange(len(COMPUTATIONS)), self._place_beside(value))

    def compute_long(self) -> None:
        for value in self._some():
            for _ in range(self._rng.randrange(2, 20)):
                self._run(value, 0, value.place)
                value = self._values.pop()
            self._values.append(value)

    def donate(self) -> None:
        """Donate an array, in some cases while it is read."""
        for value in self._some():
            if value.shared:
                continue
            self._values.remove(value)
            if self._rng.random() < 0.5 and not value.failure:
                value.array.copy_to_host_async()
            self._run(value, self._rng.randrange(3), value.place, donate_argnums=0)

    def add(self) -> None:
        for value in self._some():
            others = [each for each in self._values if (each.place, each.shape) == (value.place, value.shape)]
            other = self._rng.choice(others)
            add = self._jit(("add", value.place), jnp.add, out_shardings=_sharding(value.place))
            failure = value.failure or other.failure
            array = None if value.array is None or other.array is None else add(value.array, other.array)
            self._values.append(Value(array, value.place, value.shape, failure))

    def reshard(self) -> None:
        for value in self._some():
            place = self._place(value.shape)
            value.shared = True
            try:
                array = None if value.array is None else jax.device_put(value.array, _sharding(place))
            except jax.errors.JaxRuntimeError as error:  # JAX may read the array
                if not value.failure or value.failure not in str(error):
                    raise
                array = None
            self._values.append(Value(array, place, value.shape, value.failure, shared=True))

    def call(self) -> None:
        """Call Python from each device of the array, and add the results or leave them divided."""
        for value in self._some():
            count = 1 if isinstance(value.place, int) else len(value.place[0])
            failing = self._rng.randrange(count) if self._rng.random() < 0.3 else -1
            self._calls += 1
            failure = value.failure or (f"call {self._calls} fails" if failing >= 0 else "")
            call = partial(self._call(value.place), np.array([self._calls, failing], np.int32))
            if failure and isinstance(value.place, int):  # JAX waits for a call on one device, and raises its error
                self._read_into(self._reserve(), replace(value, failure=failure), call)
                continue
            array = call(value.array) if value.array is not None and (self._fails or not failure) else None
            self._values.append(Value(array, value.place, value.shape, failure))
            if self._rng.random() < 0.7:
                self._read(self._values[-1])

    def _call(self, place: Place) -> Any:
        def call(number: Any, x: Any, position: Any = 0) -> Any:
            return jax.pure_callback(_called, jax.ShapeDtypeStruct(x.shape, x.dtype), x, number, position)

        if isinstance(place, int):
            return self._jit(("call", place), call)

        def shard(number: Any, x: Any) -> Any:
            y = call(number, x, lax.axis_index("x"))
            return y if place[1] >= 0 else lax.psum(y, "x")

        specs = (P(), _spec(place))
        function = jax.shard_map(shard, mesh=_mesh(place[0]), in_specs=specs, out_specs=_spec(place), check_vma=False)
        return self._jit(("call", place), function)

    def read(self) -> None:
        for value in self._some():
            self._read(value)

    def read_in_thread(self) -> None:
        for value in self._some():
            way, at, value.shared = self._rng.choice(self.ways), self._reserve(), True
            self._threads.append(threading.Thread(target=self._read_into, args=(at, value, way), daemon=True))
            self._threads[-1].start()

    def read_many(self) -> None:
        values = [each for each in self._values if not each.failure][-5:]
        self._results += jax.device_get([each.array for each in values])

    steps: tuple[Callable[[Program], None], ...] = (
        *(put, put, put, compute, compute, compute, compute_long, donate, donate, add, add, reshard, reshard, reshard),
        *(call, call, read, read, read, read_in_thread, read_many),
    )

    # ---- parts of steps

    def _some(self) -> list[Value]:
        """Return one of the values, or none before the first."""
        return [self._rng.choice(self._values)] if self._values else []

    def _place(self, shape: tuple[int, ...]) -> Place:
        if self._rng.random() < 0.3:
            return self._rng.randrange(DEVICES)
        order = self._rng.choice(ORDERS)
        return order, self._rng.choice([-1, *(d for d, size in enumerate(shape) if size % len(order) == 0)])

    def _place_beside(self, value: Value) -> Place:
        """Return a place on the devices of the array."""
        if isinstance(value.place, int):
            return value.place
        order = value.place[0]
        return order, self._rng.choice([-1, *(d for d, size in enumerate(value.shape) if size % len(order) == 0)])

    def _run(self, value: Value, number: int, place: Place, **options: Any) -> None:
        function = self._jit((number, place, *options), COMPUTATIONS[number], out_shardings=_sharding(place), **options)
        array = None if value.array is None else function(value.array)
        self._values.append(Value(array, place, value.shape, value.failure))

    def _jit(self, key: Any, function: Callable[..., Any], **options: Any) -> Any:
        if key not in self._jits:
            self._jits[key] = jax.jit(function, **options)
        return self._jits[key]

    # ---- reads

    def _read(self, value: Value) -> None:
        self._read_into(self._reserve(), value, self._rng.choice(self.ways))

    def _reserve(self) -> int:
        self._results.append("it was not read in time")
        return len(self._results) - 1

    def _read_into(self, at: int, value: Value, way: Callable[[Any], Any]) -> None:
        if value.array is None or (value.failure and not self._fails):
            self._results[at] = value.failure
            return
        try:
            self._results[at] = way(value.array)
        except Exception as error:
            self._results[at] = value.failure if value.failure and value.failure in str(error) else repr(error)

    @staticmethod
    def _after_a_wait(array: Any) -> Any:
        time.sleep(0.002)
        return np.asarray(array)

    @staticmethod
    def _when_ready(array: Any) -> Any:
        return np.asarray(array.block_until_ready())

    @staticmethod
    def _started_before(array: Any) -> Any:
        array.copy_to_host_async()
        return np.asarray(array)

    @staticmethod
    def _twice(array: Any) -> Any:
        return jax.device_get([array, array])

    @staticmethod
    def _by_shards(array: Any) -> Any:
        return [np.asarray(shard.data) for shard in array.addressable_shards]

    @staticmethod
    def _of_a_copy(array: Any) -> Any:
        return np.asarray(jnp.copy(array))

    ways: tuple[Callable[[Any], Any], ...] = (
        *(np.asarray, np.asarray, _after_a_wait, _when_ready, _started_before, _twice, _by_shards, _of_a_copy),
    )


def run(seed: int, steps: int, fails: bool) -> list[Any]:
    """Run the program of a seed."""
    return Program(seed, fails).run(steps)

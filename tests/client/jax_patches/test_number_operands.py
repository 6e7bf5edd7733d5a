"""Tests of constants for eager operations: which numbers have one, and when it is dropped."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from atoll.client import jax_internals
from atoll.client.jax_patches import number_operands
from atoll.client.jax_patches.number_operands import MAX_CONSTANTS, Constants
from atoll.client.jax_patches.read_table import ArrivingContents
from atoll.errors import Code, Status

CLIENT = object()
DEVICE: Any = SimpleNamespace(id=3, client=CLIENT)


class Cluster:
    """Cluster that counts losses, and whose constants are texts."""

    def __init__(self) -> None:
        self.losses = 0
        self.settings = "x32"
        self.can_read = True
        self.contents: list[ArrivingContents] = []
        self.on_make: Callable[[], object] = lambda: None
        self.constants = Constants(self._make, lambda: self.settings, self._request)
        self.constants.open(CLIENT, lambda: self.losses)

    def _make(self, number: float, device: Any) -> str:
        self.on_make()
        return repr(number)

    def _request(self, array: str) -> ArrivingContents | None:
        if not self.can_read:
            return None
        self.contents.append(ArrivingContents(4))
        return self.contents[-1]

    def find(self, number: float) -> Any:
        return self.constants.find(number, DEVICE)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_a_number_gets_a_constant_when_it_is_used_again(cluster: Cluster) -> None:
    assert [cluster.find(2) for _ in range(3)] == [None, "2", "2"]


def test_numbers_that_are_equal_but_differ_have_different_constants(cluster: Cluster) -> None:
    numbers: list[float] = [0, 0.0, -0.0, 1, 1.0]
    assert [cluster.find(each) for each in numbers * 2] == [None] * 5 + ["0", "0.0", "-0.0", "1", "1.0"]


@pytest.mark.parametrize("number", [float("nan"), 1 << 31, -(1 << 40)])
def test_jax_converts_other_numbers(cluster: Cluster, number: float) -> None:
    assert [cluster.find(number) for _ in range(3)] == [None] * 3


def test_arrays_of_other_clients_have_no_constants(cluster: Cluster) -> None:
    other: Any = SimpleNamespace(id=3, client=object())
    assert [cluster.constants.find(2, other) for _ in range(3)] == [None] * 3


def test_constants_are_dropped_when_the_cluster_loses_arrays(cluster: Cluster) -> None:
    assert [cluster.find(2), cluster.find(2)] == [None, "2"]
    cluster.losses += 1
    assert [cluster.find(2), cluster.find(2)] == [None, "2"]


def test_a_constant_that_its_device_did_not_make_is_made_again(cluster: Cluster) -> None:
    assert [cluster.find(2), cluster.find(2)] == [None, "2"]
    cluster.contents[0].end(Status(int(Code.RESOURCE_EXHAUSTED), "no memory"))
    assert [cluster.find(2), cluster.find(2)] == ["2", "2"]
    cluster.contents[1].take(b"abcd", more=False)
    assert cluster.find(2) == "2"
    assert len(cluster.contents) == 2


def test_a_constant_that_cannot_be_read_is_not_kept(cluster: Cluster) -> None:
    cluster.can_read = False
    assert [cluster.find(2), cluster.find(2)] == [None, "2"]
    assert len(cluster.constants) == 0


def test_a_constant_that_was_being_made_when_all_were_dropped_is_not_kept(cluster: Cluster) -> None:
    cluster.find(2)
    cluster.on_make = cluster.constants.drop
    assert cluster.find(2) is None
    assert len(cluster.constants) == 0


def test_a_client_that_was_closed_has_no_constants(cluster: Cluster) -> None:
    assert [cluster.find(2), cluster.find(2)] == [None, "2"]
    cluster.constants.clear_cache()
    assert [cluster.find(2), cluster.find(2)] == [None, None]


def test_settings_of_types_have_separate_constants(cluster: Cluster) -> None:
    assert [cluster.find(2), cluster.find(2)] == [None, "2"]
    cluster.settings = "x64"
    assert cluster.find(2) is None


def test_the_number_of_constants_is_bounded(cluster: Cluster) -> None:
    for number in range(MAX_CONSTANTS + 10):
        cluster.find(number), cluster.find(number)
    assert len(cluster.constants) == MAX_CONSTANTS


@pytest.mark.parametrize("number", [2, 2.5, 0, -3])
def test_a_constant_has_the_type_of_the_number_in_a_trace(number: float) -> None:
    made = jax_internals.number_on(number, jax.devices()[0])
    traced = jax.make_jaxpr(lambda x: x)(number).in_avals[0]
    assert (made.dtype, made.weak_type, made.committed) == (traced.dtype, traced.weak_type, False)


def test_a_number_has_no_constant_where_jax_places_it_on_a_mesh() -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        assert jax_internals.number_on(2, jax.devices()[0]) is None


def test_numbers_stay_numbers_while_jax_traces() -> None:
    seen = []
    jax.jit(lambda x: seen.append(jax_internals.is_eager()) or x)(1)  # type: ignore[func-returns-value]
    jax.vmap(lambda x: seen.append(jax_internals.is_eager()) or x)(jnp.ones(1))  # type: ignore[func-returns-value]
    assert seen == [False, False]
    assert jax_internals.is_eager()


def test_an_operation_continues_without_a_constant_that_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    def operator(self: Any, other: Any) -> Any:
        if other == "constant":
            raise RuntimeError("Array has been deleted.")
        return self, other

    monkeypatch.setattr(number_operands, "_operand", lambda *arguments: "constant")
    assert number_operands._with_constants(operator)("array", 2) == ("array", 2)

"""Tests that an MLIR context serves a limited number of consecutive programs."""

from __future__ import annotations

import pytest
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

from atoll.devices.xla.xla_compilation import MAX_CONTEXT_BYTES, Contexts


@pytest.fixture(autouse=True)
def _new_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlir, "make_ir_context", ir.Context)  # some versions of JAX may return the same context again


def entered(contexts: Contexts, program_bytes: int = 1) -> ir.Context:
    with contexts.use(program_bytes):
        return ir.Context.current


def test_a_context_is_used_again() -> None:
    contexts = Contexts()
    assert entered(contexts) is entered(contexts)


def test_a_context_is_used_by_one_at_a_time() -> None:
    contexts = Contexts()
    first = entered(contexts)
    with contexts.use(1):
        assert ir.Context.current is first
        second = entered(contexts)
    assert second is not first


def test_a_context_that_has_read_too_much_is_dropped() -> None:
    contexts = Contexts()
    first = entered(contexts, MAX_CONTEXT_BYTES)
    assert entered(contexts) is first
    assert entered(contexts) is not first


def test_a_context_in_which_something_failed_is_dropped() -> None:
    contexts = Contexts()
    first = entered(contexts)
    with pytest.raises(ValueError, match="unknown"), contexts.use(1):
        raise ValueError("unknown")
    assert entered(contexts) is not first

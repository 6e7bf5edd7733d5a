"""Tests of callbacks in programs for TPUs, from JAX's lowering to the callables of a worker's XLA client.

No TPU is used.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax._src.lib import _jax
from jax._src.lib.mlir.dialects import hlo

from atoll.client.jax_patches import host_callbacks
from atoll.client.jax_patches.compile_pipeline import CompileRequest
from atoll.client.jax_patches.host_callbacks import SendAndReceive
from atoll.devices.xla import client_callbacks
from atoll.devices.xla.client_callbacks import Signature, stubs
from atoll.errors import StatusError
from atoll.host_services.calls.function_callbacks import Callbacks
from atoll.protocol.callbacks import CALLBACKS_OPTION, CHANNELS_OPTION
from atoll.protocol.messages import HostChannels

Lower = Callable[..., tuple[bytes, list[SendAndReceive]]]


@pytest.fixture
def lower(monkeypatch: pytest.MonkeyPatch) -> Lower:
    """Lower a function as for a cluster with TPUs. Return the program that a worker receives, and its callables."""
    (replacement,) = host_callbacks.SEND_AND_RECEIVE_PATCH.changes
    patched = replacement.wrap(getattr(_jax.Client, replacement.name))
    monkeypatch.setattr(_jax.Client, replacement.name, patched)
    monkeypatch.setattr(host_callbacks, "is_atoll", lambda client: True)
    monkeypatch.setattr(mlir.ModuleContext, "get_backend", lambda context: jax.local_devices()[0].client)

    def lower(function: Callable[..., Any], *arguments: Any) -> tuple[bytes, list[SendAndReceive]]:
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
        module = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
        program = _jax.mlir.serialize_portable_artifact(module, hlo.get_current_version(), True)
        return program, list(lowered._lowering.compile_args["host_callbacks"])

    return lower


def found(program: bytes, count: int, channels: tuple[HostChannels, ...]) -> list[Signature]:
    context = mlir.make_ir_context()
    with context:
        module = _jax.mlir.deserialize_portable_artifact(program, context)
        return client_callbacks.find(program, module, count, channels=channels)


def two(x: jax.Array) -> jax.Array:
    """Call Python for two results of different types, and to print."""
    types = (jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32))
    whole, rest = jax.pure_callback(lambda x: (np.int32(x[0]), np.float32(x[1].sum())), types, x)
    jax.debug.print("{}", whole)
    return x * rest


def test_a_worker_knows_what_each_callable_takes_and_returns_by_its_channels(lower: Lower):
    program, callbacks = lower(two, jnp.ones((2, 3), jnp.float32))
    channels = tuple(each.channels for each in callbacks)
    pure, printing = found(program, 2, channels)
    assert pure.operands == (("float32", (2, 3)),)
    assert pure.results == (("int32", (3,)), ("float32", ()))
    assert printing.operands == (("int32", (3,)),)
    assert printing.results == (("float32", ()),)  # only the signal that it has ended
    assert (pure.channels, printing.channels) == channels


def test_what_a_callable_returns_has_the_types_that_the_program_receives(
    lower: Lower, capsys: pytest.CaptureFixture[str]
):
    _, (pure, printing) = lower(two, jnp.ones((2, 3), jnp.float32))
    given = pure(np.array([[1, 2, 3], [4, 5, 6]], np.float32))
    assert [(each.dtype, each.tolist()) for each in given] == [(np.int32, [1, 2, 3]), (np.float32, 15)]
    (ended,) = printing(given[0])
    assert (ended.dtype, ended.shape) == (np.float32, ())
    assert "[1 2 3]" in capsys.readouterr().out


def test_a_callback_in_a_loop_without_arguments_has_one_send_and_one_receive(lower: Lower):
    def looped(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, x: x + next_of(), x)

    def next_of() -> jax.Array:
        return jax.experimental.io_callback(lambda: np.float32(2), jax.ShapeDtypeStruct((), jnp.float32), ordered=True)

    program, callbacks = lower(looped, jnp.float32(0))
    (signature,) = found(program, 1, (callbacks[0].channels,))
    assert (signature.operands, signature.results) == ((("float32", (1,)),), (("float32", ()),))


def test_xlas_client_gets_the_types_and_channels_of_a_callable(lower: Lower):
    program, callbacks = lower(two, jnp.ones((2, 3), jnp.float32))
    signatures = found(program, 2, tuple(each.channels for each in callbacks))
    made: list[Any] = []
    client = SimpleNamespace(make_python_callback_from_host_send_and_recv=lambda *each: made.append(each) or len(made))
    called: list[Any] = []

    class Recording(Callbacks):
        def call(self, position: int, results: Any, arguments: Any) -> Any:
            called.append((position, results, arguments))
            return (np.zeros(3, np.int32), np.float32(1))

    calls = SimpleNamespace(retain=lambda *_: None, release=lambda *_: None)
    mine = Recording(calls, 7, (40, 41))  # type: ignore[arg-type]
    assert stubs(mine, signatures, client) == [1, 2]
    stub, operands, results, sends, receives, _ = made[0]
    assert [(each.dimensions(), each.numpy_dtype()) for each in operands] == [((2, 3), np.float32)]
    assert [(each.dimensions(), each.numpy_dtype()) for each in results] == [((3,), np.int32), ((), np.float32)]
    assert (tuple(sends), tuple(receives)) == (callbacks[0].channels.sends, callbacks[0].channels.receives)
    # Jaxlib accepts them in this form.
    jax.local_devices()[0].client.make_python_callback_from_host_send_and_recv(*made[0])
    stub("an array")
    assert called == [(0, signatures[0].results, ("an array",))]


def test_the_channels_go_along_with_the_numbers_when_a_program_is_compiled(
    lower: Lower, monkeypatch: pytest.MonkeyPatch
):
    _, callbacks = lower(two, jnp.ones((2, 3), jnp.float32))
    monkeypatch.setattr(host_callbacks.CLIENT_CHANNEL, "add", lambda client, given: tuple(range(5, 5 + len(given))))
    sent: list[CompileRequest] = []
    request = CompileRequest(SimpleNamespace(platform="tpu"), None, None, None, callbacks)
    host_callbacks._number(request, sent.append)
    overrides, given = dict(sent[0].added), sent[0].host_callbacks
    assert overrides[CALLBACKS_OPTION] == "5+2"
    channels = msgspec.json.decode(overrides[CHANNELS_OPTION], type=list[HostChannels])
    assert channels == [each.channels for each in callbacks]
    assert given == []


@pytest.mark.parametrize(
    ("change", "replies"),
    [
        (lambda channels: (), "can serve"),  # no process would answer
        (lambda channels: channels[:1], "can serve"),
        (lambda channels: (channels[0], HostChannels((99,), ())), "can serve"),
        (lambda channels: (*channels, HostChannels((99,), ())), r"does not use the channels \[99\]"),
        (lambda channels: tuple(HostChannels(each.receives, each.sends) for each in channels), "can serve"),
    ],
)
def test_channels_that_are_not_the_programs_are_refused(lower: Lower, change: Any, replies: str):
    program, callbacks = lower(two, jnp.ones((2, 3), jnp.float32))
    channels = change(tuple(each.channels for each in callbacks))
    with pytest.raises(StatusError, match=replies):
        found(program, len(channels), channels)


def test_other_clients_make_their_callbacks_themselves():
    (replacement,) = host_callbacks.SEND_AND_RECEIVE_PATCH.changes
    patched = replacement.wrap(lambda *given: given)
    client = SimpleNamespace(runtime_type="tpu")
    assert patched(client, print, [], [], [1], [2], None) == (client, print, [], [], [1], [2], None)

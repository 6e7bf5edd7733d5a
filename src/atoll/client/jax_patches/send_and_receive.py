"""Lets programs for TPUs call back into the user's Python.

JAX lowers a callback there to sends and receives, and has the client make one callable of them, which jaxlib's IFRT
proxy client refuses. This makes one that `host_callbacks` takes out before the program is compiled. Untested on a TPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll
from atoll.host_services.calls.hlo_host_transfers import SendAndReceive
from atoll.protocol.messages import HostChannels


def _with_channels(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_python_callback_from_host_send_and_recv(
        client: Any, callable: Any, operands: Any, results: Any, sends: Any, receives: Any, *others: Any
    ) -> Any:
        if not is_atoll(client):
            return make(client, callable, operands, results, sends, receives, *others)
        dtypes = tuple(each.numpy_dtype() for each in results)
        return SendAndReceive(callable, HostChannels(tuple(sends), tuple(receives)), dtypes)

    return make_python_callback_from_host_send_and_recv


_EXPECTED = ("self", "callable", "operand_shapes", "result_shapes", "send_channel_ids", "recv_channel_ids")
PATCH = Patch(
    name="send and receive",
    lifts="callbacks of programs on TPUs are refused",
    replacements=(
        Replacement("jaxlib._jax:Client", "make_python_callback_from_host_send_and_recv", _with_channels, _EXPECTED),
    ),
)

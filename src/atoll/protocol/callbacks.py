"""How a client's plug-in and its proxy agree on callbacks into the client's Python.

jaxlib's client refuses to send callables. So the plug-in keeps them under numbers of its own, and says the numbers in
an option of the compile request (`compile_options`). Before the first of them it asks, by a plug-in program, where
calls are to be had.
"""

from __future__ import annotations

import msgspec

# The plug-in program. The fingerprint of the executable that it gives is a `CallbackAddress`, in JSON.
CALLBACKS_REQUEST = b"atoll callbacks"


class CallbackAddress(msgspec.Struct, frozen=True):
    """A data port of the proxy. `session` and `secret` open the channel on which calls come, and answers go."""

    address: str
    session: int
    secret: str

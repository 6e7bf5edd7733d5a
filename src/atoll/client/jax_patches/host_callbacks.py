"""Lets programs call back into the user's Python.

JAX gives the compiler a program's callables; jaxlib's IFRT proxy client refuses to send them. So they are taken out
just before that, kept in this process under numbers (`client/callbacks.py`), and the numbers go along in an option of
the compile request, which the proxy takes out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atoll.client.callbacks import CallbackTable
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll
from atoll.protocol.compile_options import CALLBACKS_OPTION

TABLE = CallbackTable()


def _numbering(compile_and_load: Callable[..., Any]) -> Callable[..., Any]:
    def backend_compile_and_load(
        backend: Any, module: Any, executable_devices: Any, options: Any, host_callbacks: Sequence[Any]
    ) -> Any:
        if not host_callbacks or not is_atoll(backend):
            return compile_and_load(backend, module, executable_devices, options, host_callbacks)
        numbers = TABLE.add(backend, host_callbacks)
        before = list(options.env_option_overrides)
        options.env_option_overrides = [*before, (CALLBACKS_OPTION, f"{numbers[0]}+{len(numbers)}")]
        try:
            return compile_and_load(backend, module, executable_devices, options, [])
        except BaseException:
            TABLE.remove(numbers)
            raise
        finally:
            options.env_option_overrides = before

    return backend_compile_and_load


PATCH = Patch(
    name="host callbacks",
    lifts="Unsupported host callback type",
    replacements=(
        Replacement(
            "jax._src.compiler",
            "backend_compile_and_load",
            _numbering,
            ("backend", "module", "executable_devices", "options", "host_callbacks"),
        ),
    ),
)

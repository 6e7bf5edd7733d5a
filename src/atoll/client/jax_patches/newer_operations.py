"""Supports programs with operations that are newer than the StableHLO version that jaxlib's client writes.

jaxlib's IFRT proxy client writes each program in the StableHLO version of twelve weeks before its release, whatever the
server supports (`GetDefaultStablehloVersion` in XLA's `hlo_program_serdes.cc`), and refuses programs with newer
operations: "Failed to serialize StableHLO to plugin version". This patch writes such a program in the version of this
jaxlib, and sends it in an option of a compile request for an empty module. The proxy restores the program
(`executables/compile_requests.py`). Workers with an older jaxlib report the version that they lack.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll
from atoll.protocol.callbacks import PROGRAM_OPTION

_REFUSAL = "Failed to serialize StableHLO to plugin version"


def _second_try(compile_and_load: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    from atoll.client.jax_internals import leave_out_of_tracebacks

    leave_out_of_tracebacks(__file__)

    def backend_compile_and_load(
        backend: Any, module: Any, devices: Any, options: Any, *others: Any, **named: Any
    ) -> Any:
        try:
            return compile_and_load(backend, module, devices, options, *others, **named)
        except jax.errors.JaxRuntimeError as error:
            if _REFUSAL not in str(error) or not is_atoll(backend):
                raise
        carrier, carrying = _carried(module, options)
        return compile_and_load(backend, carrier, devices, carrying, *others, **named)

    return backend_compile_and_load


def _carried(module: Any, options: Any) -> tuple[Any, Any]:
    """Return an empty module of the same name, and options that include the whole program."""
    from jax._src.lib import _jax, xla_client
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import hlo

    written = _jax.mlir.serialize_portable_artifact(module, hlo.get_current_version(), True)
    with module.context, ir.Location.unknown(module.context):
        carrier = ir.Module.parse("func.func public @main() { return }")
        carrier.operation.attributes["sym_name"] = module.operation.attributes["sym_name"]
    carrying = xla_client.CompileOptions.ParseFromString(options.SerializeAsString())
    text = base64.b64encode(written).decode()
    carrying.env_option_overrides = [*carrying.env_option_overrides, (PROGRAM_OPTION, text)]
    return carrier, carrying


PATCH = Patch(
    name="newer operations",
    lifts=_REFUSAL,
    replacements=(
        Replacement(
            "jax._src.compiler",
            "backend_compile_and_load",
            _second_try,
            ("backend", "module", "executable_devices", "options"),
        ),
    ),
)

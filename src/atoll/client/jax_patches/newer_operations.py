"""Supports programs with operations that are newer than the StableHLO version that jaxlib's client writes.

jaxlib's IFRT proxy client writes each program in the StableHLO version of twelve weeks before its release, whatever the
server supports (`GetDefaultStablehloVersion` in XLA's `hlo_program_serdes.cc`), and refuses programs with newer
operations: "Failed to serialize StableHLO to plugin version". This patch writes such a program in the version of this
jaxlib, and sends it in an option of a compile request for an empty module. The proxy restores the program
(`executables/compile_requests.py`). Workers with an older jaxlib report the version that they lack.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

from atoll.client.jax_patches.compile_pipeline import Compile, CompilePass, CompileRequest
from atoll.client.jax_patches.patch import Patch
from atoll.protocol.callbacks import PROGRAM_OPTION

_REFUSAL = "Failed to serialize StableHLO to plugin version"


def _second_try(request: CompileRequest, compile_: Compile) -> Any:
    import jax

    try:
        return compile_(request)
    except jax.errors.JaxRuntimeError as error:
        if _REFUSAL not in str(error):
            raise
    return compile_(_carried(request))


def _carried(request: CompileRequest) -> CompileRequest:
    """Return a request for an empty module of the same name, with the whole program in an option."""
    from jax._src.lib import _jax
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import hlo

    module = request.module
    written = _jax.mlir.serialize_portable_artifact(module, hlo.get_current_version(), True)
    with module.context, ir.Location.unknown(module.context):
        carrier = ir.Module.parse("func.func public @main() { return }")
        carrier.operation.attributes["sym_name"] = module.operation.attributes["sym_name"]
    return replace(request, module=carrier).with_option(PROGRAM_OPTION, base64.b64encode(written).decode())


PATCH = Patch(
    name="newer operations",
    enables="programs with StableHLO operations that are newer than twelve weeks",
    error=_REFUSAL,
    changes=(CompilePass("newer operations", _second_try),),
)

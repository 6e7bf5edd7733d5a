"""Has XLA call transformations of HLO modules that a client has registered with JAX (`jax.extend.xla`).

XLA calls whatever its process has registered, for all that it compiles, on threads of its own. So a transformation is
registered while its client's program is compiled, and takes modules with this program's mark alone. What is answered
must be a module that takes and gives what the other did: the host has been told what the function's arrays are.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from jax._src.lib import xla_client as xc
from jax._src.lib.mlir import ir

from atoll.errors import invalid
from atoll.host_services.calls.client_compile_calls import Questions
from atoll.protocol.compile_calls import Transform

_STAGES = (0, 1)  # JAX's PipelineStage
_ATTRIBUTES = "mhlo.frontend_attributes"  # which XLA takes over into its modules


def mark(module: Any) -> bytes:
    """Marks the module; returns what XLA's form of it holds, and no other's."""
    text = secrets.token_hex(16)
    attributes = module.operation.attributes
    before = attributes.get(_ATTRIBUTES, ())
    marked = {each.name: each.attr for each in before} | {"atoll_compilation": ir.StringAttr.get(text)}
    attributes[_ATTRIBUTES] = ir.DictAttr.get(marked)
    return text.encode()


@contextmanager
def transforming(
    keys: Sequence[bytes], questions: Questions, marked: bytes, keep: Callable[[Exception, str], None]
) -> Iterator[None]:
    """While the program that is `marked` is compiled. What a transformation raises goes to `keep`, and not to XLA."""

    def transform(key: bytes, module: bytes) -> bytes | None:
        if marked not in module:
            return None
        try:
            changed = questions.ask(key, Transform(module)).program
            return _checked(changed, module) if changed else None
        except Exception as error:
            keep(error, "")
            return None

    from jaxlib import _xla

    with ExitStack() as stack:
        for key in keys:
            stage, name = _parsed(key)
            own = f"{name} {marked.decode()}"
            _xla.register_xla_transform(own, stage, partial(transform, key))
            stack.callback(_xla.clear_xla_transform, own, stage)
        yield


def _parsed(key: bytes) -> tuple[int, str]:
    _, stage, name = [*key.decode(errors="replace").split(":", 2), "", ""][:3]
    if stage not in map(str, _STAGES):
        raise invalid(f"{key[:100]!r} is no transformation")
    return int(stage), name


def _checked(changed: bytes, module: bytes) -> bytes:
    shapes = [str(xc.XlaComputation(each).program_shape()) for each in (module, changed)]
    if shapes[0] != shapes[1]:
        raise invalid(f"a transformation of a module of type {shapes[0]} has made one of type {shapes[1]}")
    return changed

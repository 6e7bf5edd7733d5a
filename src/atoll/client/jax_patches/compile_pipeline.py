"""The passes that a request to compile a program for Atoll's devices goes through in this process.

JAX compiles all programs with one function. Several patches change it, each by a pass: a function that gets the request
and the rest of the pipeline, and returns the executable. A pass may change the request, call the rest again or on
another thread, and clean up if it fails. One replacement of JAX's function runs the passes in the order of `ORDER`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atoll.client.jax_patches.patch import Replacement
from atoll.client.plugin_programs import is_atoll


@dataclass(frozen=True)
class CompileRequest:
    """The arguments of JAX's function. `added` are options for the proxy: (name, text)."""

    backend: Any
    module: Any
    devices: Any
    options: Any
    host_callbacks: Sequence[Any]
    added: tuple[tuple[str, str], ...] = ()

    def with_option(self, name: str, text: str) -> CompileRequest:
        return replace(self, added=(*self.added, (name, text)))


Compile = Callable[[CompileRequest], Any]
Pass = Callable[[CompileRequest, Compile], Any]

# The passes, by the names of their patches, from the first to the last.
ORDER = (
    "callbacks at compile time",  # runs the rest on another thread, so it comes before all others
    "host callbacks",  # removes the callables, which jaxlib's client refuses
    "FFI libraries",
    "newer operations",  # calls the rest a second time, with another module
)


class CompilePipeline:
    """The passes of installed patches, in order."""

    def __init__(self) -> None:
        self._passes: dict[str, Pass] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._passes)

    def add(self, name: str, run: Pass) -> None:
        passes = self._passes | {name: run}
        self._passes = {each: passes[each] for each in ORDER if each in passes}

    def run(self, request: CompileRequest, compile_: Compile) -> Any:
        for each in reversed(self._passes.values()):
            compile_ = _before(each, compile_)
        return compile_(request)

    def wrap(self, compile_and_load: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of JAX's function."""

        def backend_compile_and_load(
            backend: Any, module: Any, executable_devices: Any, options: Any, host_callbacks: Any, *others: Any
        ) -> Any:
            def compile_(request: CompileRequest) -> Any:
                arguments = (request.backend, request.module, request.devices, request.options, request.host_callbacks)
                before = list(request.options.env_option_overrides)
                request.options.env_option_overrides = [*before, *request.added]
                try:
                    return compile_and_load(*arguments, *others)
                finally:
                    request.options.env_option_overrides = before

            if not is_atoll(backend):
                return compile_and_load(backend, module, executable_devices, options, host_callbacks, *others)
            return self.run(CompileRequest(backend, module, executable_devices, options, host_callbacks), compile_)

        return backend_compile_and_load


def _before(run: Pass, rest: Compile) -> Compile:
    return lambda request: run(request, rest)


_PIPELINE = CompilePipeline()
_REPLACEMENT = Replacement(
    "jax._src.compiler",
    "backend_compile_and_load",
    _PIPELINE.wrap,
    ("backend", "module", "executable_devices", "options", "host_callbacks"),
)


@dataclass(frozen=True)
class CompilePass:
    """A pass of the pipeline, as a change that a patch makes. The first pass that is applied installs the pipeline.

    Args:
      patch: The name of the pass's patch, in `ORDER`.
      run: Returns the executable, by calling its second argument, the rest of the pipeline, with a request.
    """

    patch: str
    run: Pass

    @property
    def target(self) -> str:
        return _REPLACEMENT.target

    def difference(self) -> str:
        return _REPLACEMENT.difference()

    def apply(self) -> None:
        if not _PIPELINE.names:
            _REPLACEMENT.apply()
        _PIPELINE.add(self.patch, self.run)

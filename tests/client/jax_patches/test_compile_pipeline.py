"""Tests that one wrapper of JAX's compile function runs the passes of all patches that change it, in a fixed order."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from atoll.client.jax_patches import PATCHES, compile_pipeline
from atoll.client.jax_patches.compile_pipeline import (
    ORDER,
    Compile,
    CompilePass,
    CompilePipeline,
    CompileRequest,
    Pass,
)
from atoll.client.jax_patches.patch import Replacement

ATOLL, OTHER = SimpleNamespace(runtime_type="proxy/atoll"), SimpleNamespace(runtime_type="cpu")


class Jax:
    """Replacement of JAX's function, which records its calls with the options at that time."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error = error

    def __call__(self, backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> str:
        self.calls.append((module, dict(options.env_option_overrides), host_callbacks))
        if self.error is not None:
            raise self.error
        return "executable"


def options() -> Any:
    return SimpleNamespace(env_option_overrides=[("xla_dump_to", "/nowhere")])


def noting(name: str, seen: list[str]) -> Pass:
    def run(request: CompileRequest, compile_: Compile) -> Any:
        seen.append(name)
        result = compile_(replace(request.with_option(name, "1"), module=f"{request.module}+"))
        seen.append(f"after {name}")
        return result

    return run


def test_the_order_names_each_patch_with_a_pass_once() -> None:
    passes = [(patch.name, each.patch) for patch in PATCHES for each in patch.changes if isinstance(each, CompilePass)]
    assert sorted(passes) == sorted((name, name) for name in ORDER)


def test_no_other_patch_changes_the_compile_function() -> None:
    target = "jax._src.compiler.backend_compile_and_load"
    found = [each for patch in PATCHES for each in patch.changes if each.target == target]
    assert all(isinstance(each, CompilePass) for each in found)


def test_passes_run_in_the_fixed_order_whatever_the_order_of_installation() -> None:
    jax, pipeline, seen = Jax(), CompilePipeline(), []
    for name in (*ORDER[2:], ORDER[0], ORDER[1]):
        pipeline.add(name, noting(name, seen))
    assert pipeline.names == ORDER
    given = options()
    assert pipeline.wrap(jax)(ATOLL, "module", (), given, []) == "executable"
    assert seen == [*ORDER, *(f"after {name}" for name in reversed(ORDER))]
    assert jax.calls == [("module" + "+" * len(ORDER), {"xla_dump_to": "/nowhere"} | dict.fromkeys(ORDER, "1"), [])]
    assert given.env_option_overrides == options().env_option_overrides


def test_a_patch_that_is_left_out_has_no_pass() -> None:
    jax, pipeline, seen = Jax(), CompilePipeline(), []
    pipeline.add(ORDER[1], noting(ORDER[1], seen))
    pipeline.wrap(jax)(ATOLL, "module", (), options(), [])
    assert seen == [ORDER[1], f"after {ORDER[1]}"]


def test_programs_for_other_clients_go_through_no_pass() -> None:
    jax, pipeline, seen = Jax(), CompilePipeline(), []
    pipeline.add(ORDER[1], noting(ORDER[1], seen))
    assert pipeline.wrap(jax)(OTHER, "module", (), options(), ["a callable"]) == "executable"
    assert seen == []
    assert jax.calls == [("module", {"xla_dump_to": "/nowhere"}, ["a callable"])]


def test_a_pass_can_try_again_and_options_are_restored_after_an_error() -> None:
    jax, pipeline = Jax(ValueError("no")), CompilePipeline()

    def twice(request: CompileRequest, compile_: Compile) -> Any:
        with pytest.raises(ValueError, match="no"):
            compile_(request.with_option("first", "1"))
        return compile_(request.with_option("second", "2"))

    pipeline.add(ORDER[2], twice)
    given = options()
    with pytest.raises(ValueError, match="no"):
        pipeline.wrap(jax)(ATOLL, "module", (), given, [])
    assert [set(used) - {"xla_dump_to"} for _, used, _ in jax.calls] == [{"first"}, {"second"}]
    assert given.env_option_overrides == options().env_option_overrides


def test_several_passes_replace_jaxs_function_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("compiler_of_the_test")
    exec("def compile_it(backend, module): ...", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    pipeline = CompilePipeline()
    monkeypatch.setattr(compile_pipeline, "_PIPELINE", pipeline)
    monkeypatch.setattr(
        compile_pipeline, "_REPLACEMENT", Replacement(module.__name__, "compile_it", pipeline.wrap, ("backend",))
    )
    original = module.compile_it
    for name in ORDER:
        change = CompilePass(name, noting(name, []))
        assert change.difference() == ""
        change.apply()
    assert module.compile_it.__wrapped__ is original
    assert pipeline.names == ORDER

"""Tests that patches are only installed if JAX is as they expect, for the versions that they support."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

from atoll.client.jax_patches import PATCHES
from atoll.client.jax_patches.patch import (
    SUPPORTED_BEFORE,
    SUPPORTED_SINCE,
    Patch,
    Replacement,
    install,
    parameters,
)

VERSION = (0, 10, 2)


@pytest.fixture
def library() -> Iterator[Any]:
    """Return a module that replaces JAX's."""
    module: Any = ModuleType("library_of_the_test")
    exec("def double(x, times=2): return x * times\ndef triple(x): return x * 3", module.__dict__)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def negated(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: -function(*args)


def patch_of(*names: tuple[str, tuple[str, ...]], **options: Any) -> Patch:
    changes = tuple(Replacement("library_of_the_test", name, negated, expected) for name, expected in names)
    return Patch("signs", "numbers with signs", changes, "no sign", **options)


def test_a_patch_that_fits_replaces_and_calls_the_original(library: Any) -> None:
    patch = patch_of(("double", ("x",)))
    assert install([patch], VERSION) == (patch,)
    assert library.double(4) == -8


@pytest.mark.parametrize(
    ("name", "expected", "text"),
    [
        ("double", ("y",), r"library_of_the_test\.double takes \(x, times\), not \(y, \.\.\.\)"),
        ("quadruple", ("x",), "no attribute 'quadruple'"),
    ],
)
def test_a_patch_of_something_else_is_left_out_whole_with_a_warning(
    library: Any, name: str, expected: tuple[str, ...], text: str
) -> None:
    patch = patch_of(("triple", ("x",)), (name, expected))
    with pytest.warns(RuntimeWarning, match=text) as warned:
        assert install([patch], VERSION) == ()
    assert "1 of its 1 patches of JAX 0.10.2. " in str(warned[0].message)
    assert "- signs: numbers with signs (no sign)" in str(warned[0].message)
    assert library.triple(1) == 3


@pytest.mark.parametrize(("since", "before"), [((0, 10, 3), None), ((), (0, 10, 2))])
def test_a_patch_that_a_version_does_not_need_is_left_out_silently(
    library: Any, since: tuple[int, ...], before: tuple[int, ...] | None
) -> None:
    assert install([patch_of(("double", ("y",)), since=since, before=before)], VERSION) == ()
    assert library.double(4) == 8


@pytest.mark.parametrize(("since", "is_installed"), [((3, 99), False), (sys.version_info[:2], True)])
def test_a_patch_that_this_python_does_not_allow_is_left_out_silently(
    library: Any, since: tuple[int, ...], is_installed: bool
) -> None:
    install([patch_of(("double", ("x",)), since_python=since)], VERSION)
    assert (library.double(4) == -8) == is_installed


@pytest.mark.parametrize("version", [(0, 10, 1), (0, 13, 0), (1, 0)])
def test_one_warning_lists_what_a_version_that_is_not_supported_lacks(library: Any, version: tuple[int, ...]) -> None:
    patches = [patch_of(("double", ("x",))), patch_of(("triple", ("x",))), patch_of(("triple", ("x",)), since=(2,))]
    with pytest.warns(RuntimeWarning) as warned:
        assert install(patches, version) == ()
    (message,) = [str(each.message) for each in warned]
    assert message.startswith(f"Atoll leaves out 2 of its 2 patches of JAX {'.'.join(map(str, version))}, because")
    assert message.endswith("\n- signs: numbers with signs (no sign)" * 2)
    assert (library.double(1), library.triple(1)) == (2, 3)


def test_the_supported_versions_are_those_of_the_package() -> None:
    root = Path(__file__).parents[3]
    (requirement,) = [
        each
        for each in tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
        if each.startswith("jax>")
    ]
    since, before = (".".join(map(str, each)) for each in (SUPPORTED_SINCE, SUPPORTED_BEFORE))
    assert requirement == f"jax>={since},<{before}"


# ---- functions that the user's code had replaced


def test_a_function_of_jax_is_patched_inside_of_the_users_wrapper(library: Any) -> None:
    original = library.double

    def wrapper(*arguments: Any) -> Any:
        return [original(*arguments)]

    library.double = wrapper
    assert install([patch_of(("double", ("x",)))], VERSION)
    assert library.double is wrapper
    assert library.double(4) == [-8]
    library.double = original  # the patch remains when the wrapper is removed
    assert library.double(4) == -8


def test_a_patch_of_a_function_that_the_users_code_does_not_call_any_more_is_left_out(library: Any) -> None:
    library.double = lambda x: 7
    with pytest.warns(RuntimeWarning, match=r"library_of_the_test\.double was replaced by .*test_patch\."):
        assert install([patch_of(("double", ("x",)))], VERSION) == ()
    assert library.double(4) == 7


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_self_test_of_each_patch_passes_on_the_installed_jax(patch: Patch) -> None:
    if not patch.is_needed(jax.__version_info__):
        pytest.skip("it is for other versions")
    assert patch.difference() == ""


def test_parameters_of_jaxlibs_functions_are_read_from_their_signatures() -> None:
    from jaxlib import _jax

    assert parameters(_jax.hlo_module_cost_analysis) == ("arg0", "arg1")
    assert parameters(_jax.Client.deserialize_executable)[:3] == ("self", "serialized", "executable_devices")
    assert parameters(_jax.pjit)[:3] == ("function_name", "fun", "cache_miss")


def test_a_property_is_replaced_by_a_property(library: Any) -> None:
    exec("class Owner:\n  @property\n  def size(self): return 3", library.__dict__)
    patch = Patch("sizes", "sizes", (Replacement("library_of_the_test:Owner", "size", negated, ("self",)),))
    assert install([patch], VERSION) == (patch,)
    assert library.Owner().size == -3


def test_modules_that_bound_the_original_get_the_replacement(library: Any) -> None:
    copy: Any = ModuleType("copy_of_the_test")
    copy.triple = library.triple
    sys.modules[copy.__name__] = copy
    copies = ("copy_of_the_test", "never_imported")
    install(
        [Patch("signs", "signs", (Replacement("library_of_the_test", "triple", negated, ("x",), copies),))], VERSION
    )
    del sys.modules[copy.__name__]
    assert copy.triple(1) == -3


def test_pythons_errors_about_the_arguments_of_a_replacement_name_the_original(library: Any) -> None:
    exec("class Owner:\n  def size(self, unit): return 3", library.__dict__)

    def required(size: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(self: Any, unit: Any) -> Any:
            return size(self, unit)

        return replaced

    install(
        [Patch("sizes", "sizes", (Replacement("library_of_the_test:Owner", "size", required, ("self",)),))], VERSION
    )
    with pytest.raises(TypeError, match=r"^Owner\.size\(\) missing 1 required positional argument: 'unit'"):
        library.Owner().size()

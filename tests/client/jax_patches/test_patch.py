"""Patches are put in place only where JAX is as they expect, for the versions that they were written for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import pytest

from atoll.client.jax_patches import PATCHES
from atoll.client.jax_patches.patch import Patch, Replacement, install, parameters

VERSION = (0, 10, 2)


@pytest.fixture
def library() -> Iterator[Any]:
    """A module that stands for JAX's."""
    module: Any = ModuleType("library_of_the_test")
    module.double = lambda x, times=2: x * times
    module.triple = lambda x: x * 3
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def negated(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: -function(*args)


def patch_of(*names: tuple[str, tuple[str, ...]], **options: Any) -> Patch:
    replacements = tuple(Replacement("library_of_the_test", name, negated, expected) for name, expected in names)
    return Patch("signs", "numbers keep their sign", replacements, **options)


def test_a_patch_that_fits_replaces_and_calls_the_original(library: Any) -> None:
    patch = patch_of(("double", ("x",)))
    assert install([patch], VERSION) == (patch,)
    assert library.double(4) == -8


@pytest.mark.parametrize(
    ("name", "expected", "said"),
    [
        ("double", ("y",), r"library_of_the_test\.double takes \(x, times\), not \(y, \.\.\.\)"),
        ("quadruple", ("x",), "no attribute 'quadruple'"),
    ],
)
def test_a_patch_of_something_else_is_left_out_whole_with_a_warning(
    library: Any, name: str, expected: tuple[str, ...], said: str
) -> None:
    patch = patch_of(("triple", ("x",)), (name, expected))
    with pytest.warns(RuntimeWarning, match=said) as warned:
        assert install([patch], VERSION) == ()
    assert "numbers keep their sign" in str(warned[0].message)
    assert library.triple(1) == 3


@pytest.mark.parametrize(("since", "before"), [((0, 10, 3), (0, 13)), ((0, 10), (0, 10, 2))])
def test_a_patch_for_other_versions_is_left_out_silently(
    library: Any, since: tuple[int, ...], before: tuple[int, ...]
) -> None:
    assert install([patch_of(("double", ("y",)), since=since, before=before)], VERSION) == ()
    assert library.double(4) == 8


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_self_test_of_each_patch_passes_on_the_installed_jax(patch: Patch) -> None:
    if not patch.since <= jax.__version_info__ < patch.before:
        pytest.skip("it is for other versions")
    assert patch.difference() == ""


def test_parameters_of_jaxlibs_functions_are_read_from_their_signatures() -> None:
    from jaxlib import _jax

    assert parameters(_jax.hlo_module_cost_analysis) == ("arg0", "arg1")
    assert parameters(_jax.Client.deserialize_executable)[:3] == ("self", "serialized", "executable_devices")
    assert parameters(_jax.pjit)[:3] == ("function_name", "fun", "cache_miss")


def test_a_property_is_replaced_by_a_property(library: Any) -> None:
    class Owner:
        @property
        def size(self) -> int:
            return 3

    library.Owner = Owner
    patch = Patch("sizes", "", (Replacement("library_of_the_test:Owner", "size", negated, ("self",)),))
    assert install([patch], VERSION) == (patch,)
    assert Owner().size == -3


def test_modules_that_bound_the_original_get_the_replacement(library: Any) -> None:
    copy: Any = ModuleType("copy_of_the_test")
    copy.triple = library.triple
    sys.modules[copy.__name__] = copy
    copies = ("copy_of_the_test", "never_imported")
    install([Patch("signs", "", (Replacement("library_of_the_test", "triple", negated, ("x",), copies),))], VERSION)
    del sys.modules[copy.__name__]
    assert copy.triple(1) == -3

"""Patches of JAX in the user's process, and their installation.

A patch lifts one limitation of jaxlib's IFRT proxy client, which no server can lift. Each patch is a constant of a file
in this package and a line of the table in `__init__`. `docs/design/jax-patches.md` documents each. Invariant: for
arrays, devices and clients that are not Atoll's, JAX behaves exactly as without the patch.

Before a patch is installed, a self-test checks that JAX has the names that the patch replaces, with the expected
parameters. If not, the whole patch is left out. One warning lists all patches that are left out. Tests check how JAX
uses the names, because that would delay the start of scripts (`tests/client/jax_patches/test_probes.py`).
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

from atoll.client.jax_patches.redirection import redirect

# The versions of JAX with which the patches are tested: from SUPPORTED_SINCE, and before SUPPORTED_BEFORE.
SUPPORTED_SINCE = (0, 10, 2)
SUPPORTED_BEFORE = (0, 13)

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Change(Protocol):
    """A change of JAX that is part of a patch."""

    @property
    def target(self) -> str:
        """The name in JAX that is changed."""

    def difference(self) -> str:
        """Describe how JAX differs from what the change expects, or return ""."""

    def apply(self) -> None: ...


@dataclass(frozen=True)
class Replacement:
    """The replacement of one function or property of JAX or jaxlib.

    Args:
      owner: A module, or a class in a module: "jaxlib._jax:Device".
      name: The name in `owner`.
      wrap: Called once with the original function; returns the new function. The new function calls the original for
        everything that is not Atoll's.
      parameters: Names of the first parameters that the original must have, in order. Unnamed parameters of jaxlib's
        functions are numbered (arg0, arg1; the first parameter of a method is self).
      copies: Modules from which scripts import the function, possibly before the patch is installed. If there are any,
        the original function object is redirected to the new function.
    """

    owner: str
    name: str
    wrap: Wrap
    parameters: tuple[str, ...]
    copies: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"

    def difference(self) -> str:
        """Describe how JAX differs from what the replacement expects, or return ""."""
        try:
            found = getattr(self._resolve(), self.name)
        except (ImportError, AttributeError) as error:
            return f"{self.target}: {error}"
        original = self._original(found)
        if original is None:
            function = _function(found)
            return f"{self.target} was replaced by {function.__module__}.{function.__qualname__}"
        names = parameters(original)
        if names[: len(self.parameters)] != self.parameters:
            return f"{self.target} takes ({', '.join(names)}), not ({', '.join(self.parameters)}, ...)"
        return ""

    def apply(self) -> None:
        owner = self._resolve()
        found = getattr(owner, self.name)
        original = self._original(found)
        if original is not _function(found):  # the user's wrapper stays, and continues to call the changed function
            redirect(inspect.unwrap(original), self.wrap)
            return
        holders = [owner, *(sys.modules[each] for each in self.copies if each in sys.modules)]
        new: Any = redirect(original, self.wrap) if self.copies else self.wrap(original)
        new.__name__, new.__doc__, new.__wrapped__ = self.name, original.__doc__, original
        if isinstance(original, FunctionType):  # Python's errors about arguments contain it
            new.__qualname__ = original.__qualname__
        for holder in holders:
            setattr(holder, self.name, property(new) if isinstance(found, property) else new)

    def _original(self, found: Any) -> Any:
        """Return JAX's function, or None. It may be inside a wrapper, if the user's code has replaced it."""
        function = _function(found)
        if not isinstance(function, FunctionType) or self._is_own(function):
            return function
        called = (each for each in _used_by(function) if each.__name__ == self.name and self._is_own(each))
        return next(called, None)

    def _is_own(self, function: FunctionType) -> bool:
        """Return whether the function is defined in JAX, or in Atoll, since two patches may change one function."""
        package = str(function.__globals__.get("__name__")).partition(".")[0]
        return package in ("jax", "jaxlib", "atoll", self.owner.partition(":")[0].partition(".")[0])

    def _resolve(self) -> Any:
        module, _, attribute = self.owner.partition(":")
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found


@dataclass(frozen=True)
class Patch:
    """Changes of JAX that lift one limitation. Either all of them are installed or none.

    Args:
      name: The name in warnings and in the documentation.
      enables: The feature that needs the patch.
      changes: The changes.
      error: The error of JAX without the patch, if it is an error.
      since, before: The versions of JAX that have the limitation, if these are not all supported versions.
      since_python: The first version of Python with which the patch is possible.
    """

    name: str
    enables: str
    changes: tuple[Change, ...]
    error: str = ""
    since: tuple[int, ...] = ()
    before: tuple[int, ...] | None = None
    since_python: tuple[int, ...] = ()

    def is_needed(self, version: tuple[int, ...]) -> bool:
        """Return whether this version of JAX has the limitation, and this Python can lift it."""
        is_in_jax = self.since <= version and (self.before is None or version < self.before)
        return is_in_jax and self.since_python <= sys.version_info[:2]

    def difference(self) -> str:
        """Describe how JAX differs from what the patch expects, or return "". This is the self-test."""
        return "; ".join(filter(None, (each.difference() for each in self.changes)))


def install(patches: Sequence[Patch], version: tuple[int, ...]) -> tuple[Patch, ...]:
    """Install the patches that this version of JAX needs and that pass their self-test. Return them.

    Install none in a version that is not supported. If patches are left out, warn once, with what stops working.
    """
    needed = [patch for patch in patches if patch.is_needed(version)]
    is_supported = SUPPORTED_SINCE <= version < SUPPORTED_BEFORE
    done, left_out = [], []
    for patch in needed:
        difference = patch.difference() if is_supported else ""
        if difference or not is_supported:
            reasons = filter(None, (patch.error, difference))
            left_out.append(f"\n- {patch.name}: {patch.enables}" + "".join(f" ({each})" for each in reasons))
            continue
        for change in patch.changes:
            change.apply()
        done.append(patch)
    if left_out:
        supported = f"jax>={_text(SUPPORTED_SINCE)},<{_text(SUPPORTED_BEFORE)}"
        reason = "" if is_supported else f", because they are only tested with {supported}"
        warnings.warn(
            f"Atoll leaves out {len(left_out)} of its {len(needed)} patches of JAX {_text(version)}{reason}. "
            f"JAX on Atoll then lacks:{''.join(left_out)}",
            RuntimeWarning,
            stacklevel=2,
        )
    return tuple(done)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _used_by(function: FunctionType) -> Iterator[FunctionType]:
    """Yield the Python functions that a function wraps or uses as variables."""
    variables = inspect.getclosurevars(function)
    wrapped = getattr(function, "__wrapped__", None)
    for each in (wrapped, *variables.nonlocals.values(), *variables.globals.values()):
        if isinstance(each, FunctionType):
            yield each


def _function(found: Any) -> Any:
    """Return the getter of a property, or the function itself."""
    return found.fget if isinstance(found, property) else found


def parameters(function: Any) -> tuple[str, ...]:
    """Return the names of a function's parameters; for an overloaded jaxlib function, those of the first overload."""
    function = inspect.unwrap(_function(function))
    if signatures := getattr(function, "__nb_signature__", None):
        return _parameters_of_text(str(signatures[0][0]))
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _parameters_of_text(signature: str) -> tuple[str, ...]:
    """Parse the parameters of a text such as "def name(self, a: Sequence[int], b: bool = \\0, /) -> list[Array]"."""
    flat, count = signature, 1
    while count:  # remove brackets, since types in them contain commas
        flat, count = re.subn(r"\[[^][]*\]", "", flat)
    names = (each.partition(":")[0].strip() for each in flat.partition("(")[2].partition(")")[0].split(","))
    return tuple(name for name in names if name.isidentifier())

"""Patches of JAX in the user's process, and their installation.

A patch lifts one limitation of jaxlib's IFRT proxy client. The client refuses before it sends a message, so a server
cannot lift it. Each patch is a constant of a file in this package and a line of the table in `__init__`. Invariant: for
arrays, devices and clients that are not Atoll's, JAX behaves exactly as without the patch.

A patch replaces names of JAX or jaxlib. Before that, a self-test checks that each name exists with the parameters that
the patch expects. If not, the whole patch is left out with a warning, and the limitation remains.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.client.jax_patches.redirection import redirect

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


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
            original = getattr(self._resolve(), self.name)
        except (ImportError, AttributeError) as error:
            return f"{self.target}: {error}"
        found = parameters(original)
        if found[: len(self.parameters)] != self.parameters:
            return f"{self.target} takes ({', '.join(found)}), not ({', '.join(self.parameters)}, ...)"
        return ""

    def apply(self) -> None:
        owner = self._resolve()
        found = getattr(owner, self.name)
        holders = [owner, *(sys.modules[each] for each in self.copies if each in sys.modules)]
        original = _function(found)
        new: Any = redirect(original, self.wrap) if self.copies else self.wrap(original)
        new.__name__, new.__doc__, new.__wrapped__ = self.name, original.__doc__, original
        for holder in holders:
            setattr(holder, self.name, property(new) if isinstance(found, property) else new)

    def _resolve(self) -> Any:
        module, _, attribute = self.owner.partition(":")
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found


@dataclass(frozen=True)
class Patch:
    """Replacements that lift one limitation of jaxlib's client. Either all of them are installed or none.

    `lifts` is the client's error message, or describes what happens without the patch; it is part of the warning about
    a patch that is left out. `since` and `before` bound the JAX versions of the patch: with other versions, it is left
    out silently.
    """

    name: str
    lifts: str
    replacements: tuple[Replacement, ...]
    since: tuple[int, ...] = (0, 10, 2)
    before: tuple[int, ...] = (0, 13)

    def difference(self) -> str:
        """Describe how JAX differs from what the patch expects, or return "". This is the self-test."""
        return "; ".join(filter(None, (each.difference() for each in self.replacements)))


def install(patches: Sequence[Patch], version: tuple[int, ...]) -> tuple[Patch, ...]:
    """Install and return the patches that are for this version of JAX and pass their self-test."""
    done = []
    for patch in patches:
        if not patch.since <= version < patch.before:
            continue
        if difference := patch.difference():
            warnings.warn(
                f"Atoll does not install its patch {patch.name!r} of JAX {'.'.join(map(str, version))}: {difference}. "
                f"This limitation remains: {patch.lifts}",
                RuntimeWarning,
                stacklevel=2,
            )
            continue
        for replacement in patch.replacements:
            replacement.apply()
        done.append(patch)
    return tuple(done)


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

"""What a patch of JAX is, and how it is put in place.

A patch lifts one refusal of jaxlib's IFRT proxy client, in the user's process: the client refuses before any message is
sent, so no server could. Each is one file of this package with a constant `PATCH`, and one line of the table in
`__init__`. The invariant: arrays, devices and clients that are not Atoll's get exactly what JAX would do without it.

A patch replaces names of JAX or jaxlib. Before it does, it is tested whether each is there with the parameters that the
patch expects. Where one is not, the whole patch is left out, with a warning, and the refusal stands.
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
    """One name of a function or property, and what stands in its place.

    `owner` is a module, or a class of one: "jaxlib._jax:Device". `parameters` are those that the original must have,
    in this order and first, by name; jaxlib's functions number those that have none (arg0, arg1; a method's first is
    self). `wrap` makes the new function of the original, which it calls for all that is not Atoll's; called once.

    `copies` are the modules whose users look the name up, possibly before the patch is installed: the original function
    itself is redirected for them.
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
        """What is not as expected; "" where all is."""
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
    """A refusal of jaxlib's client, and the replacements that lift it, all of them or none.

    `lifts` is the refusal in the client's words, or what happens without the patch; it ends the warning "the patch is
    left out". `since` and `before` bound the JAX versions for which it was written: in others it is left out silently.
    """

    name: str
    lifts: str
    replacements: tuple[Replacement, ...]
    since: tuple[int, ...] = (0, 10, 2)
    before: tuple[int, ...] = (0, 13)

    def difference(self) -> str:
        """What of JAX is not as the patch expects; "" where all is. The self-test."""
        return "; ".join(filter(None, (each.difference() for each in self.replacements)))


def install(patches: Sequence[Patch], version: tuple[int, ...]) -> tuple[Patch, ...]:
    """Puts those of the patches in place that hold for this version of JAX and pass their self-test; returns them."""
    done = []
    for patch in patches:
        if not patch.since <= version < patch.before:
            continue
        if difference := patch.difference():
            warnings.warn(
                f"Atoll leaves its patch {patch.name!r} of JAX {'.'.join(map(str, version))} out: {difference}. "
                f"So this stands: {patch.lifts}",
                RuntimeWarning,
                stacklevel=2,
            )
            continue
        for replacement in patch.replacements:
            replacement.apply()
        done.append(patch)
    return tuple(done)


def _function(found: Any) -> Any:
    """What a name stands for; of a property, its getter."""
    return found.fget if isinstance(found, property) else found


def parameters(function: Any) -> tuple[str, ...]:
    """The names of a function's parameters; of an overloaded one of jaxlib's, those of the first form."""
    function = inspect.unwrap(_function(function))
    if signatures := getattr(function, "__nb_signature__", None):
        return _parameters_of_text(str(signatures[0][0]))
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _parameters_of_text(signature: str) -> tuple[str, ...]:
    """Those of "def name(self, a: Sequence[int], b: bool = \\0, /) -> list[Array]"."""
    flat, count = signature, 1
    while count:  # types in brackets have commas of their own
        flat, count = re.subn(r"\[[^][]*\]", "", flat)
    names = (each.partition(":")[0].strip() for each in flat.partition("(")[2].partition(")")[0].split(","))
    return tuple(name for name in names if name.isidentifier())

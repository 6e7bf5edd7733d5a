"""How users set a value: in an environment variable, with a key of a cluster file, or with an option of a command.

`cluster.settings` has the settings of a cluster, and `cluster.environment_variables` those of single processes. The
options, help texts, keys, error messages and docs/reference/settings.md are derived from these tables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Generic, TypeVar

import msgspec

from atoll.cluster.former_names import FORMER_VARIABLES
from atoll.errors import SettingsError
from atoll.quantities import parse_bytes

Value = TypeVar("Value")
Choice = TypeVar("Choice", bound=StrEnum)


class Form(msgspec.Struct, Generic[Value], frozen=True):
    """A kind of value: how it is written.

    `parse` raises a ValueError with the expected form if a text is invalid. `keys` are the types that a value may have
    in a cluster file, as Python reads it. `text` is the inverse of `parse`. For a list, `check_item` checks each item.
    """

    parse: Callable[[str], Value]
    metavar: str
    keys: tuple[type, ...] = (str,)
    text: Callable[[Value], str] = str
    check_item: Callable[[str], object] | None = None
    is_flag: bool = False


def _amount(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError:
        raise ValueError("expected an amount of memory, such as 16GiB or 500MB") from None


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("expected 1 or 0")
    return text == "1"


TEXT: Form[str] = Form(str, "TEXT")
AMOUNT = Form(_amount, "AMOUNT", (int, str))
FLAG = Form(_flag, "", (bool,), lambda value: "1" if value else "0", is_flag=True)


def checked(check: Callable[[str], object], metavar: str) -> Form[str]:
    """Return the form of a text for which `check` raises no ValueError."""

    def parse(text: str) -> str:
        check(text)
        return text

    return Form(parse, metavar)


def listed(check: Callable[[str], object], metavar: str) -> Form[tuple[str, ...]]:
    """Return the form of several texts, which are separated by colons in a variable."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(filter(None, text.split(os.pathsep)))
        for each in found:
            check(each)
        return found

    return Form(parse, metavar, (list,), os.pathsep.join, check)


def seconds(minimum: float = 0.0, maximum: float = sys.float_info.max) -> Form[float]:
    """Return the form of a time in seconds within these bounds."""

    def parse(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = -1.0
        if not minimum <= found <= maximum:
            raise ValueError(f"expected a number of seconds{f', {minimum:g} or more' if minimum else ''}")
        return found

    return Form(parse, "SECONDS", (int, float))


def count(minimum: int = 0) -> Form[int]:
    """Return the form of a number that is at least `minimum`."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < minimum:
            raise ValueError(f"expected a number, {minimum} or more")
        return int(text)

    return Form(parse, "NUMBER", (int,))


def choice(choices: type[Choice]) -> Form[Choice]:
    """Return the form of one of the values of an enum."""

    def parse(text: str) -> Choice:
        try:
            return choices(text)
        except ValueError:
            raise ValueError(f"expected {' or '.join(choices)}") from None

    return Form(parse, "|".join(choices))


class Setting(msgspec.Struct, Generic[Value], frozen=True):
    """A value that users can set.

    Attributes:
      variable: The environment variable.
      form: How the value is written.
      help: One or more sentences for `--help` and the reference page.
      name: The option without leading dashes; with _ for - it is the key in cluster files. "" for neither.
      is_option: Whether commands that start a cluster have the option.
      default: The text of the default, if the default of the field does not tell it.
      metavar: The name of the value in `--help`, if that of the form is too general.
      more: Markdown that only the reference page has, such as a link, relative to docs/.
    """

    variable: str
    form: Form[Value]
    help: str
    name: str = ""
    is_option: bool = True
    default: str = ""
    metavar: str = ""
    more: str = ""

    @property
    def key(self) -> str:
        """Return the key in cluster files, or ""."""
        return self.name.replace("-", "_")

    def text(self, environment: Mapping[str, str] = os.environ) -> str:
        """Return the text of the variable, or of its former name; "" if neither is set."""
        return environment.get(self.variable, "") or environment.get(FORMER_VARIABLES.get(self.variable, ""), "")

    def get(self, environment: Mapping[str, str] = os.environ) -> Value | None:
        """Return the value in the environment, or None. Raise a SettingsError that names the variable."""
        text = self.text(environment)
        return self.parse(text, self.variable) if text else None

    def parse(self, text: str, source: str) -> Value:
        """Return the value of a text. Raise a SettingsError that names its source."""
        try:
            return self.form.parse(text)
        except ValueError as error:
            raise SettingsError(f"{source} is {text[:200]!r}: {error}") from None

    def from_key(self, value: Any, source: str) -> Any:
        """Return the value of a key of a cluster file. Raise a SettingsError that names its source."""
        if type(value) not in self.form.keys:
            expected = " or ".join(dict.fromkeys(_TOML[each] for each in self.form.keys))
            raise SettingsError(f"{source} is {value!r}: expected {expected}")
        if isinstance(value, list):
            return self.from_items(value, source)
        return self.parse(str(int(value) if isinstance(value, bool) else value), source)

    def from_items(self, items: Sequence[Any], source: str) -> Any:
        """Return the value with these items, for the form of a list. Raise a SettingsError that names its source."""
        assert self.form.check_item is not None
        for each in items:
            if not isinstance(each, str):
                raise SettingsError(f"{source} contains {each!r}: expected {_TOML[list]}")
            try:
                self.form.check_item(each)
            except ValueError as error:
                raise SettingsError(f"{source}: {error}") from None
        return tuple(items)


_TOML = {str: "a string", int: "a number", float: "a number", bool: "true or false", list: "a list of strings"}

"""Inject the faults that the environment names into this process. See `tests.faults`."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


def raises_if_file(function: Function, path: str) -> Function:
    """Raise TypeError in one call after the file was created. This call removes the file."""

    @functools.wraps(function)
    def faulty(*arguments: Any, **options: Any) -> Any:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return function(*arguments, **options)
        raise TypeError("an injected bug")

    return faulty


def raises_if_own_file(function: Function, path: str) -> Function:
    """Raise TypeError in one call after the file `PATH.PID` of this process was created. This call removes the file."""

    @functools.wraps(function)
    def faulty(*arguments: Any, **options: Any) -> Any:
        try:
            os.unlink(f"{path}.{os.getpid()}")  # this process may have been forked since
        except FileNotFoundError:
            return function(*arguments, **options)
        raise TypeError("an injected bug")

    return faulty


def ignored_if_file(function: Function, path: str) -> Function:
    """Do nothing in one call after the file was created. This call removes the file."""

    @functools.wraps(function)
    def faulty(*arguments: Any, **options: Any) -> Any:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return function(*arguments, **options)

    return faulty


def raises_if(function: Function, condition: str) -> Function:
    """Raise TypeError in each call whose `arguments`, a tuple, satisfy a condition, which is a Python expression."""

    @functools.wraps(function)
    def faulty(*arguments: Any, **options: Any) -> Any:
        if eval(condition, {"arguments": arguments}):
            raise TypeError("an injected bug")
        return function(*arguments, **options)

    return faulty


def fails_while(function: Function, path: str) -> Function:
    """Raise OSError in each call while the file exists."""

    @functools.wraps(function)
    def faulty(*arguments: Any, **options: Any) -> Any:
        if os.path.exists(path):
            raise OSError("an injected fault")
        return function(*arguments, **options)

    return faulty


def timed(function: Function, path: str) -> Function:
    """Write the milliseconds of CPU time of the longest call to `PATH.NAME.PID`. Start again if the file is removed."""
    longest = 0.0

    @functools.wraps(function)
    def faulty(*arguments: Any, **options: Any) -> Any:
        nonlocal longest
        begin = time.thread_time()
        try:
            return function(*arguments, **options)
        finally:
            seconds = time.thread_time() - begin
            file = f"{path}.{function.__name__}.{os.getpid()}"  # this process may have been forked since
            if seconds > longest or not os.path.exists(file):
                longest = seconds
                with open(f"{file}.new", "w") as out:
                    out.write(str(1000 * seconds))
                os.replace(f"{file}.new", file)  # the test may read it at any time

    return faulty


class _Patching(importlib.abc.MetaPathFinder):
    """Import hook that replaces functions in modules after they were loaded."""

    def __init__(self, faults: dict[str, str]) -> None:
        self._faults: dict[str, list[tuple[str, str]]] = {}
        for place, fault in faults.items():
            module, _, name = place.partition(":")
            self._faults.setdefault(module, []).append((name, fault))
        for module in self._faults.keys() & sys.modules.keys():  # a forked process has imported it
            assert all("." in name for name, _ in self._faults[module]), "others may have imported a function"
            _replace(sys.modules[module], self._faults[module])

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._faults:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._faults[name])
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, faults: list[tuple[str, str]]) -> None:
        self._loader = loader
        self._faults = faults

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _replace(module, self._faults)


def _replace(module: ModuleType, faults: list[tuple[str, str]]) -> None:
    for name, fault in faults:
        *owners, attribute = name.split(".")
        owner = functools.reduce(getattr, owners, module)
        kind, _, argument = fault.partition(":")
        replacement = globals()[kind](getattr(owner, attribute), *filter(None, [argument]))
        setattr(owner, attribute, replacement)


if "ATOLL_TEST_FAULTS" in os.environ:
    sys.meta_path.insert(0, _Patching(json.loads(os.environ["ATOLL_TEST_FAULTS"])))

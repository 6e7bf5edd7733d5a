"""Programs as text, for `register-program`.

in x@0          an argument on device 0; with `number` behind it, an integer
y = put 0       the bytes of a feed become an array on device 0
y = f(x)        call f, which `register-function` has put on its devices; f(!x) donates x
z = transfer y 1
read y          send y to the client
report y        report the number y to the controller
return y z
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from atoll.ir.program import Call, DeviceToHost, HostBuffer, HostToDevice, Node, Program, Report, Transfer
from atoll.ir.types import ArraySpec, Sharding
from tests.controller.transcripts.transcript_files import TranscriptError


def array(devices: Sequence[int]) -> ArraySpec:
    """Return the type of all arrays in transcripts: two float32 numbers (8 bytes) on each of the devices."""
    return ArraySpec("float32", (2,), Sharding(tuple(devices)))


class ProgramReader:
    """Parser of one program. `function` returns the number and the devices of a function, given its name."""

    def __init__(self, name: str, function: Callable[[str], tuple[int, tuple[int, ...]]]) -> None:
        self._name = name
        self._function = function
        self._arguments: list[ArraySpec] = []
        self._nodes: list[Node] = []
        self._values: dict[str, int] = {}
        self._results: list[str] = []
        self._feeds = 0

    def read(self, lines: Sequence[str]) -> Program:
        """Parse and return the program."""
        for line in lines:
            self._read(line)
        results = tuple(self._values[each] for each in self._results)
        return Program(self._name, tuple(self._arguments), tuple(self._nodes), results, self._feeds)

    def _read(self, line: str) -> None:
        if found := re.fullmatch(r"in (\w+)@([\d,]+)( number)?", line):
            devices = _devices(found[2])
            self._arguments.append(ArraySpec("int32", (), Sharding(devices)) if found[3] else array(devices))
            self._define(found[1])
        elif found := re.fullmatch(r"return(.*)", line):
            self._results = found[1].split()
        elif found := re.fullmatch(r"(\w+) = put (\d+)", line):
            self._add(HostToDevice((HostBuffer(self._feed(), (2,), None, None),), (array(_devices(found[2])),)))
            self._define(found[1])
        elif found := re.fullmatch(r"(\w+) = transfer (\w+) ([\d,]+)", line):
            self._add(Transfer((self._values[found[2]],), (array(_devices(found[3])),), reshard=True))
            self._define(found[1])
        elif found := re.fullmatch(r"read (\w+)", line):
            self._add(DeviceToHost((self._values[found[1]],), self._feed(), None))
            self._define("done")
        elif found := re.fullmatch(r"report (\w+)", line):
            self._add(Report((self._values[found[1]],)))
        elif found := re.fullmatch(r"(\w+) = (\w+)\((.*)\)", line):
            self._call(*found.groups())
        else:
            raise TranscriptError(f"cannot read {line!r}")

    def _call(self, result: str, name: str, arguments: str) -> None:
        function, devices = self._function(name)
        inputs = [each.strip() for each in arguments.split(",") if each.strip()]
        donated = tuple(i for i, each in enumerate(inputs) if each.startswith("!"))
        values = tuple(self._values[each.removeprefix("!")] for each in inputs)
        self._add(Call(function, values, (array(devices),), devices, donated))
        self._define(result)

    def _add(self, node: Any) -> None:
        self._nodes.append(node)

    def _define(self, name: str) -> None:
        self._values[name] = len(self._values)

    def _feed(self) -> int:
        self._feeds += 1
        return self._feeds - 1


def _devices(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))

"""Several threads may be the first to decode a type."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.prose import dotted, nodes_of

pytestmark = pytest.mark.together("sources")

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "atoll"

# Threads that decode new types at the same time, and switch as often as Python allows.
_SCRIPT = """
import sys, threading
from typing import Union
import msgspec
from atoll.decodable import decodable

sys.setswitchinterval(1e-6)
prepare = decodable if sys.argv[1] == "prepared" else lambda kind: kind
for i in range(100):
    inner = msgspec.defstruct(f"Inner{i}", [(f"f{j}", list[dict[str, int | str | None]]) for j in range(20)])
    outer = msgspec.defstruct(f"Outer{i}", [(f"g{j}", inner) for j in range(5)], tag=True)
    other = msgspec.defstruct(f"Other{i}", [("x", inner)], tag=True)
    message = outer(*[inner(*[[{"a": 1}]] * 20)] * 5)
    encoded, start, found = msgspec.msgpack.encode(message), threading.Barrier(4), []

    def work():
        start.wait()
        found.append(msgspec.msgpack.Decoder(prepare(Union[outer, other])).decode(encoded))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [message] * 4
"""


def _types_of_decoders(path: Path) -> list[ast.expr]:
    """Return the types that a file passes to msgspec, to decode or to convert."""
    found: list[ast.expr | None] = []
    for node in nodes_of(path):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        given = {each.arg: each.value for each in node.keywords}.get("type")
        if name.startswith("msgspec.") and name.endswith((".decode", ".Decoder")):
            found.append(node.args[0] if name.endswith(".Decoder") and node.args else given)
        elif name == "msgspec.convert":
            found.append(node.args[1] if len(node.args) > 1 else given)
    return [each for each in found if each is not None]


def test_threads_decode_a_type_for_the_first_time() -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT, "prepared"], check=True, timeout=60)


def test_all_types_that_are_decoded_are_prepared() -> None:
    types = {path: _types_of_decoders(path) for path in SOURCE.rglob("*.py") if path.name != "decodable.py"}
    assert sum(map(len, types.values())) > 50, "this test does not find the decoders"
    unprepared = [
        f"{path.relative_to(ROOT)}:{kind.lineno}"
        for path, found in types.items()
        for kind in found
        if not (isinstance(kind, ast.Call) and dotted(kind.func) == "decodable")
    ]
    assert not unprepared, "use decodable(...) around the type: " + ", ".join(unprepared)


def test_no_decoder_has_another_name() -> None:
    """Otherwise the test above would not find it."""
    found = [
        str(path.relative_to(ROOT))
        for path in SOURCE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom)
        and node.module in ("msgspec", "msgspec.json", "msgspec.msgpack")
        and {each.name for each in node.names} & {"convert", "decode", "json", "msgpack", "Decoder"}
    ]
    assert not found

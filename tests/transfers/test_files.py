"""Files that are handed on by their descriptors, and what a client may do to them meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.transfers.engine import Piece
from tests.transfers.ends import SECONDS, content


@pytest.mark.parametrize("nbytes", [0, 5, 100_000])
def test_a_file_goes_by_its_descriptor_and_stays_as_it_is(unix_ends, short_directory: Path, nbytes):
    path = short_directory / "file"
    path.write_bytes(content(nbytes).tobytes() + b"and more")
    taken = []
    done = threading.Event()

    def take(piece: Piece, got: Any, finish: Callable[[], None]) -> None:
        if nbytes:
            got[0] += 1  # a private mapping: the array of it may be written over
        taken.append(bytes(got))
        done.set()

    thread = threading.Thread(target=unix_ends[1].receive, args=(take,), daemon=True)
    thread.start()
    with open(path, "rb") as file:
        unix_ends[0].send_file(1, 2, nbytes, file.fileno())
    assert done.wait(SECONDS)
    assert taken[0][1:] == content(nbytes).tobytes()[1:]
    assert path.read_bytes() == content(nbytes).tobytes() + b"and more"
    unix_ends[0].close()
    thread.join(SECONDS)

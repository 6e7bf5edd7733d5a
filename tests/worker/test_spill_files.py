"""Tests of spill files: complete, checked, and removed when they are dropped."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from atoll.errors import Code, StatusError
from atoll.protocol import messages as m
from atoll.worker import spill_files
from tests.file_limits import no_more_files

CONTENTS = np.random.default_rng(0).integers(0, 256, 3_000_001, np.uint8)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    spill_files.make_directory(str(tmp_path / "session"))
    return str(tmp_path / "session")


def test_what_is_written_is_read(directory: str):
    for number, contents in enumerate([CONTENTS, CONTENTS[:0]]):
        piece = spill_files.write(directory, number, contents.data)
        assert (piece.number, piece.nbytes) == (number, contents.nbytes)
        assert Path(piece.path).stat().st_mode & 0o777 == 0o600
        assert np.array_equal(spill_files.read(piece), contents)


def shared(directory: str, numbers: range) -> list[m.SpilledPiece]:
    """Pieces of different sizes in one file."""
    file = spill_files.SharedFile(directory)
    pieces = [file.write(number, CONTENTS[number : 100 * number].data) for number in numbers]
    file.finish()
    return pieces


def test_pieces_that_share_a_file_are_read_one_by_one(directory: str):
    pieces = shared(directory, range(1, 5))
    assert [each.offset for each in pieces] == [0, 99, 297, 594]
    assert {each.path for each in pieces} == {f"{directory}/1.piece"}
    assert os.listdir(directory) == ["1.piece"]
    for piece in pieces:
        assert np.array_equal(spill_files.read(piece), CONTENTS[piece.number : 100 * piece.number])


def test_threads_share_a_file(directory: str):
    file = spill_files.SharedFile(directory)
    with ThreadPoolExecutor(8) as pool:
        pieces = list(pool.map(lambda number: file.write(number, CONTENTS[number : 2000 + number].data), range(200)))
    file.finish()
    assert len(os.listdir(directory)) == 1
    for piece in pieces:
        assert np.array_equal(spill_files.read(piece), CONTENTS[piece.number : 2000 + piece.number])


def test_a_shared_file_that_is_not_needed_is_removed(directory: str):
    file = spill_files.SharedFile(directory)
    file.finish()  # nothing was written
    file = spill_files.SharedFile(directory)
    file.write(1, CONTENTS[:100].data)
    file.remove()
    assert os.listdir(directory) == []
    spill_files.remove_unused(directory)
    assert not Path(directory).exists()


def test_a_piece_of_former_versions_begins_its_file(directory: str):
    piece = spill_files.write(directory, 1, CONTENTS.data)
    former = msgspec.msgpack.encode([piece.number, piece.nbytes, piece.path, piece.checksum])
    assert msgspec.msgpack.decode(former, type=m.SpilledPiece) == piece


@pytest.mark.parametrize("fault", ["flipped", "torn", "gone", "pipe", "directory"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_what_is_not_what_was_written_is_refused(directory: str, fault: str, is_shared: bool):
    piece = shared(directory, range(1, 5))[-1] if is_shared else spill_files.write(directory, 1, CONTENTS.data)
    path = Path(piece.path)
    found = bytearray(path.read_bytes())
    path.unlink()
    match fault:
        case "flipped":
            found[piece.offset + 200] ^= 4
            path.write_bytes(found)
        case "torn":
            path.write_bytes(found[:-1])
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
    with pytest.raises(StatusError) as refused:
        spill_files.read(piece)
    assert refused.value.status.code == Code.DATA_LOSS
    assert str(path) in refused.value.status.message


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 8), (8, -8), (1, 1 << 62), (1 << 62, 8), (99, 2)])
def test_bytes_that_a_file_does_not_have_are_refused(directory: str, offset: int, nbytes: int):
    piece = spill_files.write(directory, 1, CONTENTS[:100].data)
    with pytest.raises(StatusError, match=r"has 100 bytes, and bytes .* were spilled there") as refused:
        spill_files.read(msgspec.structs.replace(piece, offset=offset, nbytes=nbytes))
    assert refused.value.status.code == Code.DATA_LOSS


def test_the_error_of_a_missing_file_names_the_machine_and_says_what_to_do(directory: str):
    piece = spill_files.write(directory, 1, CONTENTS.data)
    Path(piece.path).unlink()
    with pytest.raises(StatusError, match=r"No such file or directory on \S+\. If another machine was") as refused:
        spill_files.read(piece)
    assert f"on {os.uname().nodename}. " in refused.value.status.message
    assert refused.value.status.details.is_loss


def test_a_file_that_cannot_be_read_now_is_not_reported_as_lost(directory: str):
    piece = spill_files.write(directory, 1, CONTENTS.data)
    with no_more_files(), pytest.raises(StatusError, match=f"cannot read {piece.path}: Too many open files") as caught:
        spill_files.read(piece)
    assert caught.value.status.code == Code.UNAVAILABLE
    assert caught.value.status.details.retriable
    assert not caught.value.status.details.is_loss
    assert np.array_equal(spill_files.read(piece), CONTENTS)


def test_the_manifest_lists_the_pieces_with_their_checksums(directory: str):
    pieces = shared(directory, (2, 1))
    spill_files.write_manifest(directory, 3, b'{"number":7}', pieces)
    found = msgspec.json.decode((Path(directory) / "host-3.json").read_bytes(), type=spill_files.Manifest)
    assert (found.format, found.host, bytes(found.session)) == (2, 3, b'{\n    "number": 7\n  }')
    rows = {"number": 1, "file": "2.piece", "offset": 198, "nbytes": 99, "crc32": pieces[1].checksum}
    assert found.pieces[0] == rows


def test_dropped_pieces_leave_no_file_and_no_directory(directory: str):
    pieces = [spill_files.write(directory, number, CONTENTS.data) for number in range(3)]
    spill_files.write_manifest(directory, 0, b"", pieces)
    spill_files.remove(pieces[:1])
    assert len(list(Path(directory).iterdir())) == 3
    spill_files.remove([*pieces, m.SpilledPiece(9, 1, f"{directory}/9.piece")])
    assert not Path(directory).exists()


def test_a_directory_that_cannot_be_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StatusError, match=r"cannot make the directory .*file/session: Not a directory"):
        spill_files.make_directory(str(tmp_path / "file" / "session"))
    with pytest.raises(StatusError, match=r"cannot write 10 B to .*: No such file"):
        spill_files.write(str(tmp_path / "none"), 1, CONTENTS[:10].data)


def test_only_directories_that_no_version_has_are_removed(tmp_path: Path):
    names = ["published-a-1", "published-a-2", "published-a-3", "published-b-1", "published-a-x", "session-1"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.piece").touch()
    spill_files.remove_others(str(tmp_path / "published-a-"), 3, {2})
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(set(names) - {"published-a-1"})

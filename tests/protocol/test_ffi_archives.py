"""Tests of the archives that contain an FFI library and those that it needs."""

from __future__ import annotations

import pytest

from atoll.errors import StatusError
from atoll.protocol.ffi_libraries import MAX_ARCHIVE_FILES, LibraryFile, archived, files_in_archive


def test_an_archive_contains_the_files_in_their_order() -> None:
    files = (LibraryFile("package/kernels.so", b"first"), LibraryFile("package.libs/other.so", b"second"))
    assert files_in_archive(archived(files)) == files


def test_a_library_is_no_archive() -> None:
    assert files_in_archive(b"\x7fELF and so on") == ()


@pytest.mark.parametrize(
    "paths",
    [["/a"], ["../a"], ["a/../../b"], ["a/./b"], ["a//b"], ["."], [""], ["a\0b"], ["a", "a"]],
    ids=["absolute", "parent", "later parent", "dot", "empty part", "directory", "empty", "zero byte", "twice"],
)
def test_paths_outside_the_directory_are_refused(paths: list[str]) -> None:
    with pytest.raises(StatusError, match="invalid paths"):
        files_in_archive(archived([LibraryFile(each, b"") for each in paths]))


@pytest.mark.parametrize("count", [0, MAX_ARCHIVE_FILES + 1])
def test_an_archive_has_a_limited_number_of_files(count: int) -> None:
    with pytest.raises(StatusError, match="invalid files of an FFI library"):
        files_in_archive(archived([LibraryFile(f"file{each}", b"") for each in range(count)]))

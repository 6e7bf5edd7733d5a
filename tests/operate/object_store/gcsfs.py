"""Replacement of the package gcsfs in which a bucket is a directory of $BUCKETS."""

from __future__ import annotations

import os
from typing import Any

from fsspec.implementations.local import LocalFileSystem


class GCSFileSystem(LocalFileSystem):  # type: ignore[misc]
    protocol = ("gs", "gcs")

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return os.path.join(os.environ["BUCKETS"], path.removeprefix("gs://"))

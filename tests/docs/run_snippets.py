"""Run the Python blocks of pages, each page in a separate namespace: `python run_snippets.py PAGE...`.

All pages use one embedded cluster, but a page may connect to another one. The program prints a JSON object with the
list of the blocks' outputs for each page, or with the traceback of an exception.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import atoll
from tests.docs.snippets import Snippet, snippets_of


def outputs_of(snippets: list[Snippet]) -> list[str] | str:
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    slices: set[atoll.Slice] = set()
    for snippet in snippets:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(snippet.code, f"{snippet.page}:{snippet.line}", "exec"), names)
        except Exception:
            return traceback.format_exc()
        outputs.append(printed.getvalue())
        slices.update(value for value in names.values() if isinstance(value, atoll.Slice))
    for each in slices:  # the next page may need all devices
        each.release()
    return outputs


def main(pages: list[str]) -> None:
    found = {}
    open_cluster = None
    for page in pages:
        snippets = [each for each in snippets_of(Path(page)) if each.is_run]
        if open_cluster is None and not any("atoll.connect(" in each.code for each in snippets):
            open_cluster = atoll.connect(islands="2x1x4")
        found[page] = outputs_of(snippets)
    if open_cluster is not None:
        open_cluster.close()
    print(json.dumps(found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        pages = [str(Path(page).resolve()) for page in sys.argv[1:]]
        os.chdir(directory)
        main(pages)

"""Rewrite the transcripts: python -m tests.controller.transcripts --rewrite [NAME.txt ...]"""

from __future__ import annotations

import argparse
import difflib
import sys

from tests.controller.transcripts.commands import runner
from tests.controller.transcripts.transcript_files import DIRECTORY, files, rewritten


def main() -> int:
    """Compare the transcripts with the controller's reactions, or rewrite them."""
    parser = argparse.ArgumentParser(prog="python -m tests.controller.transcripts")
    parser.add_argument("names", nargs="*", metavar="NAME.txt", help="names of transcripts; all by default")
    parser.add_argument("--rewrite", action="store_true", help="write the transcripts instead of comparing them")
    options = parser.parse_args()
    differ = 0
    for path in [DIRECTORY / name for name in options.names] or files():
        before = path.read_text()
        after = rewritten(before, runner())
        if before == after:
            continue
        differ += 1
        if options.rewrite:
            path.write_text(after)
            print(f"{path.name} was rewritten")
        else:
            sys.stdout.writelines(
                difflib.unified_diff(before.splitlines(True), after.splitlines(True), path.name, path.name)
            )
    return int(differ > 0 and not options.rewrite)


if __name__ == "__main__":
    sys.exit(main())

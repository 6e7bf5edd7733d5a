"""Report files that may hold a second concept, and packages by size: `python -m tests.sizes`. It never fails."""

from __future__ import annotations

from collections import Counter

from tests.test_layers import SOURCE, modules

MANY_LINES = 400  # from here on, ask whether a file holds a second concept; a state machine may have 1,000


def main() -> None:
    lines = {path.relative_to(SOURCE): path.read_text().count("\n") for path in modules().values()}
    by_package = Counter[str]()
    for path, count in lines.items():
        by_package[path.parts[0]] += count
    print(f"{sum(lines.values()):,} lines in {len(lines)} files, {len(by_package)} packages and modules")
    print("largest: " + ", ".join(f"{package} {count:,}" for package, count in by_package.most_common(5)))
    for path, count in sorted(lines.items(), key=lambda item: -item[1]):
        if count >= MANY_LINES and "_pb2" not in path.name:
            print(f"{path}: {count} lines: does it hold a second concept?")


if __name__ == "__main__":
    main()

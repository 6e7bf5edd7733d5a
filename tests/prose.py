"""Find sentences in docstrings, comments, messages and Markdown that a technical editor would rewrite.

    python -m tests.prose [PATH...]    print the findings of these files and directories

A finding is a place to read again, by the rules of CONTRIBUTING.md. `test_tidy` compares the share of findings in each
directory with the limit for it.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_WORDS = 40  # of a sentence

_START = r"(?:^|[.!?:;] +)"
RULES = {
    "a clause as the subject": _START
    + r"(?:Who(?:ever|se)?|What(?:ever)?|Where|Those (?:that|who|of)|All that)\b(?![^.]*\?)",
    "'a' for 'per'": r"\b(?:one|each|two|three|four|process|message|worker|file|thread|plan|call)s? an? "
    r"(?:host|device|island|session|machine|step|shard|gang|second|node|pair)\b",
    "a negated noun for a verb": r"\b(?:is|are|was|were) (?:none|nothing|no (?:time|place|more|use|one's))\b"
    r"|\bnobody's\b",
    "a literary word": r"\b(?:anew|lately|thereof|wherein|thereby|hereby|henceforth|mend(?:s|ed|ing)?|wholly|thaws?)\b",
    "'else' for 'otherwise'": r"(?:^|[.:;,] +)[Ee]lse(?:,| (?:it|the|an?|one|who|what|they|this|each)\b)",
    "'go on' for 'continue'": r"\b(?:go(?:es)?|going|went|gone) on\b",
    "an idiom": r"\b(?:(?:is|are) back|ha(?:s|ve) come|(?:stands?|puts?) aside|for good|in the clear|gives? way|"
    r"comes? to|lets? go|of its own)\b",
    "a metaphor": r"\b(?:rooms?|seats?|legs? of|strikes?|struck|homecoming|last words?|hears?|heard|told|wishe?s?)\b",
    "'too' at the end of a clause": r", too\b(?=[.,;:)])",
    "'alone' for 'only'": r"\balone\b",
    "'by' for 'using'": r"\bby (?:numbers|what|words?|the word|sources|TLS|TCP)\b",
    "a pronoun without its noun": r"(?:^|[.!?] +)(?:The same (?:of|for)|N?either|Nor|One that|Another|"
    r"Of (?:these|those|that)|Theirs?|Its? own)\b",
}
_COMPILED = {name: re.compile(pattern) for name, pattern in RULES.items()}


@dataclass(frozen=True)
class Finding:
    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text[:120]}"


def children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the direct children of a node, as `ast.iter_child_nodes` does, which takes three times as long.

    Omit the contexts of expressions, such as `ast.Load`. A node has its context as an attribute.
    """
    for name in node._fields:
        if name == "ctx":
            continue
        child = getattr(node, name, None)
        if isinstance(child, ast.AST):
            yield child
        elif type(child) is list:
            for each in child:
                if isinstance(each, ast.AST):
                    yield each


def walked(node: ast.AST) -> list[ast.AST]:
    """Return a node and all nodes below it, in the order of `ast.walk`."""
    found = [node]
    for each in found:  # the list grows
        found += children(each)
    return found


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a Python file's syntax tree, of which the first is the module.

    Several tests of one run look at them. There are millions, which stay, so the garbage collector leaves them out.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    nodes = walked(ast.parse(path.read_text(encoding="utf-8")))
    gc.freeze()
    if was_enabled:
        gc.enable()
    return nodes


def dotted(node: ast.AST) -> str:
    """Return a name such as `os.environ` as it is written, and "" for all other expressions.

    `ast.unparse` takes a hundred times as long.
    """
    if isinstance(node, ast.Attribute):
        return f"{before}.{node.attr}" if (before := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def comments_in(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of Python source, numbered by line. A `#` in a string of one line may pass for one."""
    text = re.sub(r'"""[\s\S]*?"""', lambda match: "\n" * match.group().count("\n"), source)
    for number, line in enumerate(text.splitlines(), 1):
        if (found := re.search(r"(?:^|\s)#+ (.*)$", line)) is not None:
            yield number, found[1]


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of prose in a file, numbered: all of Markdown but its code; docstrings, strings and comments."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        is_code = False
        for number, line in enumerate(source.splitlines(), 1):
            if line.lstrip().startswith("```"):
                is_code = not is_code
            elif not is_code:
                yield number, line
        return
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 2:
            yield from enumerate(node.value.splitlines(), node.lineno)
    yield from comments_in(source)


def sentences_in(line: str) -> int:
    """Return how many sentences a line of prose counts as: those that end in it, and at least one."""
    return max(1, len(re.findall(r"[.!?:](?: |$)", line))) if line.strip() else 0


def findings(path: Path) -> list[Finding]:
    found = []
    for number, line in lines_of(path):
        text = re.sub(r"`[^`]*`", "X", line).strip()
        found += [Finding(path, number, rule, text) for rule, pattern in _COMPILED.items() if pattern.search(text)]
        if any(len(sentence.split()) > MAX_WORDS for sentence in re.split(r"(?<=[.!?]) ", text)):
            found.append(Finding(path, number, f"more than {MAX_WORDS} words", text))
    return found


def files_in(path: Path) -> list[Path]:
    """Return the Python and Markdown files at or below a path, but for generated ones."""
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    return [
        each
        for each in found
        if each.suffix in (".py", ".md") and "_pb2" not in each.name and "_build" not in each.parts
    ]


if __name__ == "__main__":
    for argument in sys.argv[1:] or ("README.md", "docs", "src"):
        for file in files_in(Path(argument)):
            for finding in findings(file):
                print(finding)

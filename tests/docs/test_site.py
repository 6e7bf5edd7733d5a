"""Tests of the documentation: it builds without warnings, its pictures are up to date, and the files that it names
exist.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from pygments.lexers import get_lexer_by_name
from pygments.token import Token

from docs.commands_page import commands
from docs.pictures.draw import Box, pictures, svg
from tests.forked_process import run
from tests.test_layers import LAYERS

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]

# As `python -m sphinx`, in a process that has imported JAX and Atoll.
SPHINX = "import sys; from sphinx.cmd.build import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)  # twelve seconds of CPU time, which take long on a busy machine
def test_the_site_builds_offline_without_a_warning(tmp_path: Path) -> None:
    # Sphinx reads all pages and resolves all references, but writes two pages of HTML only. The first one has the
    # theme's navigation for all pages. `make docs` writes the others in the same way, in ten more seconds, and replaces
    # quotes by typographic ones.
    page = "design/life-of-a-launch"
    for builder, pages in (("dummy", []), ("html", ["index", page])):
        built = run(
            [
                *(sys.executable, "-c", SPHINX, "-q", "-b", builder, "-D", "smartquotes=0"),
                *("-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / builder)),
                *(str(DOCS / f"{each}.md") for each in pages),
            ],
            cwd=ROOT,
            timeout=600.0,
        )
        assert built.returncode == 0, built.stderr
        expected = "search index couldn't be loaded, but not all documents will be built"
        assert [line for line in built.stderr.splitlines() if not pages or expected not in line] == []
    assert (tmp_path / "html" / f"{page}.html").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_of_code_can_be_highlighted(page: Path) -> None:
    for language, text in re.findall(r"^ *```(\w[\w+-]*)\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE):
        lexer = get_lexer_by_name(language)
        assert [value for kind, value in lexer.get_tokens(text) if kind in Token.Error] == [], (language, text)


@pytest.mark.parametrize("name", sorted(pictures()))
def test_a_picture_is_the_one_that_is_drawn(name: str) -> None:
    assert (DOCS / "pictures" / name).read_text() == svg(pictures()[name]), "run python docs/pictures/draw.py"


def test_every_package_is_in_the_picture_of_packages() -> None:
    boxes = [part for part in pictures()["packages.svg"][2] if isinstance(part, Box)]
    assert sorted(box.title for box in boxes) == sorted(package for layer in LAYERS for package in layer)
    assert [box.title for box in boxes for line in box.lines if 6.5 * len(line) > box.width] == []  # points per letter


def test_the_pictures_name_files_that_exist() -> None:
    lines = {
        line for _, _, parts in pictures().values() for part in parts if isinstance(part, Box) for line in part.lines
    }
    names = {name for line in lines for name in re.findall(r"[\w/]+\.py", line)}
    assert {name for name in names if not (ROOT / "src" / "atoll" / name).exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_files_that_exist(page: Path) -> None:
    names = re.findall(r"`([\w./-]+(?:\.py|\.md|\.toml|\.json|/))`", page.read_text())
    ours = {name for name in names if not name.startswith(("/", "~", "."))}  # independent of the machine and the user
    bases = (ROOT, ROOT / "src" / "atoll", page.parent)
    assert {name for name in ours if not any((base / name).exists() for base in bases)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_of_the_repository_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_the_glossary_has_a_meaning_for_each_word() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (DOCS / "reference" / "glossary.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| word")
    ]
    assert rows
    assert [row[0] for row in rows if len(row) != 3 or not row[1]] == []


def test_every_command_is_in_the_reference() -> None:
    page = (DOCS / "reference" / "commands.md").read_text()
    assert [name for name in commands() if f"`atoll {name}" not in page] == []

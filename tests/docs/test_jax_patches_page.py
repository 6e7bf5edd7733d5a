"""Compare the page about patches of JAX with the patches."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from atoll.client.jax_patches import PATCHES
from atoll.client.jax_patches.patch import Patch

PAGE = Path(__file__).parents[2] / "docs" / "design" / "jax-patches.md"
_FIELD = re.compile(r"^- \*\*(?P<name>[^*]+)\*\*: (?P<text>.*(?:\n  .*)*)", re.MULTILINE)
_LINK = re.compile(
    r"\]\(https://github\.com/(jax-ml/jax|openxla/xla|python/cpython)/(blob/[0-9a-f]{40}/|issues/|pull/)"
)


def sections() -> dict[str, str]:
    """Return the sections of the patches, by heading."""
    _, _, text = PAGE.read_text().partition("\n## The patches\n")
    parts = re.split(r"^### (.*)$", text.partition("\n## ")[0], flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_page_has_each_patch_in_the_order_of_the_table() -> None:
    assert list(sections()) == [patch.name for patch in PATCHES]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_page_says_what_a_patch_does_and_what_would_replace_it(patch: Patch) -> None:
    section = sections()[patch.name]
    fields = {each["name"]: " ".join(each["text"].split()) for each in _FIELD.finditer(section)}
    assert list(fields) == ["Enables", "Replaces", "Without it", "Why", "Unnecessary if"]
    assert fields["Enables"] == f"{patch.enables}."
    assert set(re.findall(r"`([^`]+)`", fields["Replaces"])) == {each.target for each in patch.changes}
    assert f"`{patch.error}`" in fields["Without it"] or not patch.error
    assert _LINK.search(fields["Unnecessary if"])
    bounds = [("since", patch.since)] if patch.since else [("before", patch.before)] if patch.before else []
    for word, version in bounds:
        assert f"Only for JAX {word} {'.'.join(map(str, version))}." in section
    assert ("Only for JAX" in section) == bool(bounds)
    python = ".".join(map(str, patch.since_python))
    assert ("Only for Python" in section) == bool(python)
    assert f"Only for Python since {python}." in section or not python


def test_the_page_names_the_functions_that_several_patches_change() -> None:
    _, _, text = PAGE.read_text().partition("\n## Functions with several changes\n")
    targets = Counter(target for patch in PATCHES for target in {each.target for each in patch.changes})
    # These two patches are for different versions of JAX.
    versions = {f"jaxlib._xla.{verb}_xla_transform_c_api" for verb in ("register", "clear")}
    several = {target for target, count in targets.items() if count > 1} - versions
    assert set(re.findall(r"`(jax[\w.]+)`", text.partition("\n## ")[0])) == several

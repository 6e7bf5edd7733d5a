"""The anchors of headings."""

from __future__ import annotations

import re


def anchor_of(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and MyST make it."""
    without_links = re.sub(r"\]\([^)]*\)", "", heading)
    return re.sub(r"[^\w\- ]", "", without_links.lower()).replace(" ", "-")

"""The JSON that commands print about a cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from atoll.operate.cluster_queries import Target

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_json(target: Target, fields: Mapping[str, Any], *, in_one_line: bool = False) -> None:
    """Print a JSON object: the name of the cluster, the address at which it was reached, and these fields."""
    name = target.record.name if target.record else ""
    document = {"name": name, "address": target.reached_at, **fields}
    print(json.dumps(document, indent=None if in_one_line else 1), flush=in_one_line)

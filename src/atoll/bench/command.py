"""The commands below `atoll bench`."""

from __future__ import annotations

import typer

from atoll.bench.micro.command import micro
from atoll.bench.paper.command import add_to

bench = typer.Typer(no_args_is_help=True, help="Measure Atoll beside its peers, in turn, in one run.")
bench.command()(micro)
add_to(bench)

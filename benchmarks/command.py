"""The commands below `python -m benchmarks`."""

from __future__ import annotations

import typer

from benchmarks.compare import compare
from benchmarks.elastic.command import elastic
from benchmarks.elastic.recovery_command import recoveries
from benchmarks.exchange import exchange
from benchmarks.gpu import gpu
from benchmarks.grpo import grpo
from benchmarks.micro.command import micro
from benchmarks.named_arrays import named_arrays
from benchmarks.paper.command import add_to
from benchmarks.subscribers import subscribers
from benchmarks.suspension import suspension

bench = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure Atoll beside its peers, in turn, in one run.",
)
bench.command(help="Dispatch, transfers, memory and starts: what the least of each costs.")(micro)
bench.command(help="A training that loses islands and gets them back, beside stock JAX.")(elastic)
bench.command(help="Recoveries of a training with and without a step that was compiled ahead.")(recoveries)
bench.command(help="This code beside that of another commit.")(compare)
bench.command("named-arrays")(named_arrays)
bench.command()(suspension)
bench.command()(exchange)
bench.command()(subscribers)
bench.command()(gpu)
bench.command()(grpo)
add_to(bench)

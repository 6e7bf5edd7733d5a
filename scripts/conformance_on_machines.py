"""JAX's tests on a cluster whose hosts are on several "machines" of the test bed, and the client on one more; as root.

    python -m scripts.conformance_on_machines --islands 1x2x4 --jax CHECKOUT --suite core

Options but `--islands` are those of `scripts.conformance`. Machines have a /tmp of their own: a checkout below /tmp is
shown there, and results have to be kept elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from atoll.cluster.topology import Topology
from scripts.conformance.__main__ import CACHE, REASONS
from tests.machines.bed import Machines
from tests.machines.clusters import ROOT, MachineCluster, environment

COMPILED = Path("/tmp/compiled")  # on each machine its own

app = typer.Typer(add_completion=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def on_machines(
    context: typer.Context,
    islands: Annotated[str, typer.Option(help="Islands of the cluster. Each host is a machine.")] = "1x2x4",
    cache: Annotated[Path, typer.Option(help="Directory for stock results and the last report.")] = CACHE,
) -> None:
    """Run the tests of JAX across several machines, using TLS. All other options are those of scripts.conformance."""
    hosts = Topology.parse(islands).host_count
    cache = cache.expanduser().resolve()
    if cache.is_relative_to("/tmp"):
        raise typer.BadParameter("machines have a /tmp of their own: choose another directory", param_hint="--cache")
    shown = [each for each in context.args if each.startswith("/tmp/") and Path(each).is_dir()]
    with Machines(hosts + 2, shown) as bed, MachineCluster(bed, islands, COMPILED) as cluster:
        for name in bed.names[1:-1]:
            cluster.host(name)
        cluster.is_up()
        places = ["--cache", str(cache), "--reasons", str(ROOT / REASONS)]
        command = [sys.executable, "-m", "scripts.conformance", "--standing", *places, *context.args]
        tests = bed.popen(bed.names[-1], command, environment(**cluster.of_clients))
        try:
            status = tests.wait()
        finally:
            tests.kill()
            (cache / "machines.log").write_text(cluster.log())
    raise typer.Exit(status)


if __name__ == "__main__":
    app()

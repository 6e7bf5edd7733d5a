"""A batch script for Slurm: one job that starts a cluster and runs a command on it.

The first node runs the controller and the command, and every node runs a host agent. The job creates the credentials
and passes them in the environment of its steps, so the nodes need no shared directory.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.cluster.tenant_settings import DEFAULT_NAME, TENANT_MARK
from atoll.cluster.topology import Topology
from atoll.errors import SettingsError

_GPUS = ("cuda", "gpu", "rocm")
# Seconds for the controller to write the hosts' join token.
_START_SECONDS = 60


@dataclass(frozen=True)
class SlurmJob:
    """The job to describe. `settings` are more flags for `atoll up`, `directives` are more directives for sbatch."""

    name: str
    topology: Topology
    command: Sequence[str]
    platform: str = ""
    settings: Sequence[str] = ()
    directives: Sequence[str] = ()
    file: str = ""  # content of a cluster file, which replaces `--islands`
    join_file: str = ""  # path of the join token for other clients; {tenant} is replaced by each name in `tenants`
    tenants: Sequence[str] = ()


def batch_script(job: SlurmJob) -> str:
    """Return the script for `sbatch`. Raise SettingsError if hosts have different numbers of GPUs."""
    hosts, shapes = job.topology.host_count, job.topology.shapes
    gpus = {shape.devices if shape.platform in _GPUS else 0 for shape in shapes}
    if len(gpus) > 1:
        text = "; ".join(f"island {number} has {shape}" for number, shape in enumerate(shapes))
        raise SettingsError(
            f"all nodes of a Slurm job have the same GPUs, and these islands differ: {text}. Start the cluster with "
            "`atoll up --engine hosts`, and run `atoll host` in a separate job for each kind of node"
        )
    directives = [f"--job-name={job.name}", f"--nodes={hosts}", "--ntasks-per-node=1"]
    if gpus != {0}:
        directives.append(f"--gpus-per-node={gpus.pop()}")
    platform = ["--platform", job.platform] if job.platform else []
    islands = [] if job.file else ["--islands", str(job.topology)]
    up = shlex.join(["atoll", "up", "--foreground", "--engine", "hosts", *islands, *platform, *job.settings])
    up += ' --cluster "$directory/cluster.toml"' if job.file else ""
    lines = ["#!/bin/bash", *(f"#SBATCH {each}" for each in (*directives, *job.directives))]
    joins = [job.join_file.replace(TENANT_MARK, name) for name in (DEFAULT_NAME, *job.tenants)]
    return "\n".join(lines) + _BODY.format(
        up=up,
        file=_file(job.file),
        hosts=hosts,
        seconds=_START_SECONDS,
        command=shlex.join(job.command),
        join_file=shlex.quote(job.join_file) if job.join_file else '"$directory/clients"',
        own_join=shlex.quote(joins[0]) if job.join_file else '"$directory/clients"',
        written=" " + shlex.join(dict.fromkeys(joins)) if job.join_file else "",
    )


def _file(content: str) -> str:
    return f'printf %s {shlex.quote(content)} >"$directory/cluster.toml"\n' if content else ""


_BODY = """
# The cluster of this job: its controller runs on this node, the first one, and a host runs on each of {hosts} nodes.
set -euo pipefail

directory=$(mktemp -d)
controller= hosts=
finish() {{
  # Hosts exit when their controller does.
  if [ -n "$controller" ]; then kill "$controller" 2>/dev/null && wait "$controller" || true; fi
  if [ -n "$hosts" ]; then kill "$hosts" 2>/dev/null && wait "$hosts" || true; fi
  rm -rf "$directory"{written}
}}
trap finish EXIT
{file}
port=$((20000 + SLURM_JOB_ID % 10000))
{up} --name "slurm-$SLURM_JOB_ID" \\
  --listen "0.0.0.0:$port" --advertise "$(hostname -f)" \\
  --join-file {join_file} --host-join-file "$directory/hosts" &
controller=$!

for ((i = 0; i < {seconds} * 10; i++)); do
  [ -s "$directory/hosts" ] && break  # the controller writes this file last
  kill -0 "$controller" || exit 1
  sleep 0.1
done
[ -s "$directory/hosts" ] || {{ echo "the controller did not start within {seconds} s" >&2; exit 1; }}

ATOLL_JOIN=$(cat "$directory/hosts") srun --ntasks={hosts} --overlap --export=ALL atoll host &
hosts=$!

export ATOLL_JOIN
ATOLL_JOIN=$(cat {own_join})
export JAX_PLATFORMS=atoll,cpu
{command}
"""

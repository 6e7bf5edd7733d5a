"""A batch script for Slurm: one job that is a cluster, and runs a command on it.

The first node has the controller and the command, every node a host agent. What they prove themselves with is made in
the job and passed in the environment of its steps: no folder need be shared.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.cluster.topology import Topology

# Seconds for the controller to say how hosts join.
_START_SECONDS = 60


@dataclass(frozen=True)
class SlurmJob:
    """What the script is to say. `settings` are further flags of `atoll up`, `directives` further ones of sbatch."""

    name: str
    topology: Topology
    command: Sequence[str]
    platform: str = ""
    settings: Sequence[str] = ()
    directives: Sequence[str] = ()


def batch_script(job: SlurmJob) -> str:
    """The script, for `sbatch`."""
    hosts = job.topology.host_count
    directives = [f"--job-name={job.name}", f"--nodes={hosts}", "--ntasks-per-node=1"]
    if job.platform in ("cuda", "gpu", "rocm"):
        directives.append(f"--gpus-per-node={job.topology.devices}")
    platform = ["--platform", job.platform] if job.platform else []
    up = ["atoll", "up", "--foreground", "--engine", "hosts", "--islands", str(job.topology), *platform, *job.settings]
    lines = ["#!/bin/bash", *(f"#SBATCH {each}" for each in (*directives, *job.directives))]
    return "\n".join(lines) + _BODY.format(
        up=shlex.join(up), hosts=hosts, seconds=_START_SECONDS, command=shlex.join(job.command)
    )


_BODY = """
# One cluster for this job: its controller is on this node, the first one, and a host on each of the {hosts}.
set -euo pipefail

folder=$(mktemp -d)
controller= hosts=
finish() {{
  # Hosts end with their controller.
  if [ -n "$controller" ]; then kill "$controller" 2>/dev/null && wait "$controller" || true; fi
  if [ -n "$hosts" ]; then kill "$hosts" 2>/dev/null && wait "$hosts" || true; fi
  rm -rf "$folder"
}}
trap finish EXIT

port=$((20000 + SLURM_JOB_ID % 10000))
{up} --name "slurm-$SLURM_JOB_ID" \\
  --listen "0.0.0.0:$port" --advertise "$(hostname -f)" \\
  --join-file "$folder/clients" --host-join-file "$folder/hosts" &
controller=$!

for ((i = 0; i < {seconds} * 10; i++)); do
  [ -s "$folder/hosts" ] && [ -s "$folder/clients" ] && break
  kill -0 "$controller" || exit 1
  sleep 0.1
done
[ -s "$folder/hosts" ] || {{ echo "the controller was not up within {seconds} s" >&2; exit 1; }}

ATOLL_JOIN=$(cat "$folder/hosts") srun --ntasks={hosts} --overlap --export=ALL atoll host &
hosts=$!

export ATOLL_JOIN
ATOLL_JOIN=$(cat "$folder/clients")
export JAX_PLATFORMS=atoll,cpu
{command}
"""

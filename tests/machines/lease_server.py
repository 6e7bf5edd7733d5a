"""A server of leases on a machine: `python -m tests.machines.lease_server KIND ADDRESS DIRECTORY`.

It prints its address, and writes to DIRECTORY what a pod finds in its service account.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from tests.leadership.lease_servers import TOKEN, FakeEtcd, FakeKubernetes, server_certificates, serving_context


def main() -> None:
    kind, host, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if kind == "etcd":
        server: FakeEtcd | FakeKubernetes = FakeEtcd(host=host)
    else:
        files = server_certificates(directory, host)
        (directory / "token").write_text(TOKEN)
        (directory / "ca.crt").write_bytes(files["ATOLL_LEADER_LEASE_AUTHORITY"].read_bytes())
        server = FakeKubernetes(serving_context(files), host)
    with server.serving():
        print(server.address, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()

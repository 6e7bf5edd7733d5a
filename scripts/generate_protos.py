"""Writes src/atoll/protocol/ifrt/*_pb2.py again from the .proto files beside them: `make protos`.

Needs grpcio-tools of a protobuf generation that is no newer than the oldest protobuf that we allow (the `dev`
extra pins it): generated code refuses to load under a runtime older than its generator.
"""

from __future__ import annotations

import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
PROTOS = SOURCE / "atoll" / "protocol" / "ifrt"


def generate(destination: Path = SOURCE) -> list[Path]:
    """Writes the modules under `destination`, in the package's directories, and returns their paths.

    The .proto files are named from `src` on, so that the modules import each other by their full names.

    Raises RuntimeError where a .proto file does not compile; protoc has then printed the reason.
    """
    import grpc_tools
    from grpc_tools import protoc

    names = sorted(path.relative_to(SOURCE).as_posix() for path in PROTOS.glob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    code = protoc.main(["protoc", f"-I{SOURCE}", f"-I{well_known}", f"--python_out={destination}", *names])
    if code:
        raise RuntimeError(f"protoc exits with {code} on the files of {PROTOS}; its messages stand above")
    return [destination / name.replace(".proto", "_pb2.py") for name in names]


if __name__ == "__main__":
    try:
        written = generate()
    except ImportError:
        sys.exit("grpcio-tools is missing; install the dev extra: pip install 'atoll[dev]'")
    for module in written:
        print(module.relative_to(SOURCE.parent))

"""A base for kustomize: the manifests of a cluster as files in a directory.

The Secrets are in a file that the base does not name and that Git ignores, because a base is usually stored in a
repository. They are applied once, before the base.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from atoll.atomic_files import write_atomically
from atoll.manifests.kubernetes import Manifest, as_yaml

BASE, SECRETS = "kustomization.yaml", "secrets.yaml"
_IGNORED = ".gitignore"
# The mode of files: only their owner may read credentials.
_FILE_MODE, _SECRETS_MODE = 0o666, 0o600


def base_files(documents: Iterable[Manifest]) -> dict[str, str]:
    """Return the contents of the files, by name: one file per object, the base that names them, and the Secrets."""
    files: dict[str, str] = {}
    secrets: list[Manifest] = []
    for document in documents:
        if document["kind"] == "Secret":
            secrets.append(document)
        else:
            files[f"{document['kind'].lower()}-{document['metadata']['name']}.yaml"] = as_yaml([document])
    base = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": list(files)}
    files[BASE] = as_yaml([base])
    if secrets:
        files |= {SECRETS: as_yaml(secrets), _IGNORED: f"{SECRETS}\n"}
    return files


def write_base(directory: Path, documents: Iterable[Manifest]) -> list[str]:
    """Write the base, and return the names of its files. Files of an earlier base are replaced.

    Raises OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = base_files(documents)
    for name, content in files.items():
        mode = _SECRETS_MODE if name == SECRETS else _FILE_MODE
        write_atomically(directory / name, content.encode(), mode=mode)
    return list(files)

"""A base for kustomize: the manifests of a cluster as files in a directory.

The Secrets are in a file that the base does not name and that Git ignores, because a base is usually stored in a
repository. They are applied once, before the base.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from atoll.atomic_files import write_atomically
from atoll.errors import SettingsError
from atoll.manifests.kubernetes import Manifest, as_yaml

BASE, SECRETS = "kustomization.yaml", "secrets.yaml"
_IGNORED = ".gitignore"
_MARK = "# `atoll kubernetes --kustomize` writes this file and replaces it.\n"
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
    files[BASE] = _MARK + as_yaml([base])
    if secrets:
        files[SECRETS] = as_yaml(secrets)
    return files


def write_base(directory: Path, documents: Iterable[Manifest]) -> list[str]:
    """Write the base, and return the names of its files. Files of an earlier base are replaced.

    Raises SettingsError if the directory has a kustomization.yaml of the user, and OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = base_files(documents)
    before = _content(directory / BASE)
    if before is not None and not before.startswith(_MARK.rstrip()):
        raise SettingsError(
            f"--kustomize {directory}: its {BASE} is not one that Atoll wrote, and would be replaced. Choose another "
            "directory, or remove the file"
        )
    if SECRETS in files:
        files[_IGNORED] = _with_line(_content(directory / _IGNORED) or "", SECRETS)
    for name, content in files.items():
        mode = _SECRETS_MODE if name == SECRETS else _FILE_MODE
        write_atomically(directory / name, content.encode(errors="surrogateescape"), mode=mode)
    return list(files)


def _content(path: Path) -> str | None:
    """Return the content of a file, or None if it does not exist. Raises OSError."""
    try:
        return path.read_bytes().decode(errors="surrogateescape")
    except FileNotFoundError:
        return None


def _with_line(content: str, line: str) -> str:
    """Return `content` with this line, which is appended if it is missing."""
    if line in content.splitlines():
        return content
    end = "\n" if content and not content.endswith("\n") else ""
    return f"{content}{end}{line}\n"

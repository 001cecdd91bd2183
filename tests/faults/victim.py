"""A pusher in a process of its own, to be killed: ``python victim.py REGISTRY STATE SIZE CHUNK``."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from buildkit.registry import Credential, FixedCredentials, RegistryClient, RegistryOptions
from faults.blobs import MemoryBlob
from faults.model import SECRET, USER
from faults.pushing import REPOSITORY, data_of


def main(registry: str, state: str, size: int, chunk: int) -> None:
    """Upload one blob, and print its report as JSON."""
    credentials = FixedCredentials(registry, Credential(source="test", username=USER, password=SECRET))
    options = RegistryOptions(chunk_size=chunk)
    with RegistryClient(registry, credentials=credentials, options=options, state=state) as client:
        print(client.upload(REPOSITORY, MemoryBlob(data_of(size))).to_json())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

"""Names of volumes and where they are mounted: rules that need no host."""

from __future__ import annotations

from collections.abc import Iterable

from dstack_shim_contracts.api import VolumeInfo

ROOT = "/mnt/disks/dstack-volumes"
"""Where volumes are mounted on the host, each under its name."""


def is_volume_name(name: str) -> bool:
    """Whether a volume of this name can have a mount point: one plain visible path component."""
    return (
        0 < len(name.encode(errors="replace")) <= 200
        and not name.startswith(".")
        and "/" not in name
        and name.isprintable()
    )


def volumes_from_mounts(sources: Iterable[str], root: str = ROOT) -> tuple[VolumeInfo, ...]:
    """What a container has of volumes, by the sources of its mounts: names, nothing else.

    For a task without a record, and to cut the claim of a record that the job could write
    down to what its container confirms.
    """
    prefix = root + "/"
    names = (source.removeprefix(prefix) for source in sources if source.startswith(prefix))
    return tuple(VolumeInfo(name=name) for name in dict.fromkeys(names) if is_volume_name(name))

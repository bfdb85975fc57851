"""What the version that a shim or a file reports says about it.

Reported versions are those of dstack releases, in PEP 440's form and order. Development builds of
dstack report ``latest`` or the bare number of a build, which has no place in that order.
"""

from typing import Final

from packaging.version import InvalidVersion, Version

LONGEST_VERSION: Final = 128
"""Longest text taken for a version; parsing time and integer limits make longer ones a risk."""

FIRST_PERSISTING: Final = Version("0.21.3")
"""The first release whose own shim records its tasks on disk and takes them up again."""


def parse_version(text: object) -> Version | None:
    """Read a reported version.

    None for whatever has no place in the order of releases: ``latest``, the empty string, the bare
    number of a build, text that is not PEP 440, and anything but a string.
    """
    if not isinstance(text, str) or len(text) > LONGEST_VERSION or text != text.strip():
        return None
    try:
        version = Version(text)
    except InvalidVersion:
        return None
    return version if len(version.release) > 1 else None


def persists_state(version: Version) -> bool:
    """Whether dstack's own shim of this version keeps its tasks over a restart.

    By PEP 440 order: 0.21.3rc1 and 0.21.2.post9 come before 0.21.3, 0.21.4.dev1 after it.
    """
    return version >= FIRST_PERSISTING

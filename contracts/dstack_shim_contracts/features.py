"""What a shim may promise, and how a shim file says so without being run.

A feature is a word in the healthcheck of a running shim and in the component entry of an installed
one. Words that are not in the registry mean nothing here and are ignored.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import attrs
from dstack_shim_contracts.api import SHIM
from dstack_shim_contracts.codec import decode
from dstack_shim_contracts.errors import BodyError
from dstack_shim_contracts.statuses import TaskStatus

PERSISTED_STATE: Final = "persisted-state"

FEATURE_DOCUMENT_NAME: Final = "dstack-shim.json"
"""Name of the feature document at the root of our single-file build, which is a zip.

It is read from there and the file is never run for it: another shim takes any word on its command
line for nothing and starts as a daemon.
"""


@attrs.frozen
class Feature:
    """A promise of a shim, and the statuses in which a task survives a restart thanks to it.

    A restart needs the promise of both sides: of the running shim, which has to leave the state
    behind, and of the installed file, which has to take it up.
    """

    name: str
    meaning: str
    restart_safe: frozenset[TaskStatus]


FEATURES: Final[Mapping[str, Feature]] = MappingProxyType(
    {
        PERSISTED_STATE: Feature(
            name=PERSISTED_STATE,
            meaning="Tasks are recorded on disk and taken up again after a restart.",
            restart_safe=frozenset({TaskStatus.RUNNING}),
        ),
    }
)
"""Every feature there is, by name."""


@attrs.frozen
class FileImplementation:
    """Which program a shim file contains."""

    name: str
    version: str


@attrs.frozen
class FeatureDocument:
    """What a shim file says about itself: reported version, features, program."""

    name: str
    version: str
    features: tuple[str, ...]
    implementation: FileImplementation


def read_feature_document(raw: bytes) -> FeatureDocument:
    """Read a feature document. Raises :class:`~dstack_shim_contracts.errors.BodyError`."""
    document = decode(FeatureDocument, raw)
    if document.name != SHIM:
        raise BodyError("name", SHIM)
    if not document.version:
        raise BodyError("version", "a non-empty string")
    return document

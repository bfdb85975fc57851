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
from dstack_shim_contracts.wire import left_out_if_empty, wire

PERSISTED_STATE: Final = "persisted-state"
GUARDED_SHUTDOWN: Final = "guarded-shutdown"

TAKEOVER_PROTOCOL: Final = 1
"""How our shims hand over to each other in place: the check before, descriptors, environment."""

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
        GUARDED_SHUTDOWN: Feature(
            name=GUARDED_SHUTDOWN,
            meaning="A shutdown may ask to be refused unless every task survives it.",
            restart_safe=frozenset(),
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
    """What a shim file says about itself: reported version, features, program.

    ``takeover`` is the protocol by which it takes over in place, 0 if it cannot.
    """

    name: str
    version: str
    features: tuple[str, ...]
    implementation: FileImplementation
    takeover: int = attrs.field(default=0, metadata=wire(minimum=0, left_out=left_out_if_empty))


def read_feature_document(raw: bytes) -> FeatureDocument:
    """Read a feature document. Raises :class:`~dstack_shim_contracts.errors.BodyError`."""
    document = decode(FeatureDocument, raw)
    if document.name != SHIM:
        raise BodyError("name", SHIM)
    if not document.version:
        raise BodyError("version", "a non-empty string")
    return document

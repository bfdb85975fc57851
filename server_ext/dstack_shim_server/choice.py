"""
Which shim instances shall have, if the operator does not leave that to dstack's release.

A choice is read from the environment, kept in the record, and there the one loaded last counts for
all replicas of the server: two that want different shims would install over each other for ever.
"""

import hashlib
import json
import re
import string
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import attrs
from dstack_shim_contracts.versions import parse_version

ARCHITECTURES = ("amd64", "arm64")
_PLACES = frozenset({"version", "arch"})
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OFFER_KEYS = frozenset({"version", "url", "sha256"})


@attrs.frozen
class Offer:
    """A shim to be installed; what is empty stays as dstack has it."""

    version: str = ""
    url: str = ""
    # By architecture; the key "" stands for all.
    sha256: Mapping[str, str] = attrs.Factory(dict)

    def address(self, version: str, arch: str) -> str:
        """Return where the file is. Only for an offer with a URL."""
        return self.url.format(version=version, arch=arch)

    def digest_for(self, arch: str) -> str:
        """Return the expected SHA-256 in hexadecimal, "" if none was given."""
        return self.sha256.get(arch) or self.sha256.get("", "")


@attrs.frozen
class Choice:
    """The offer for all, and those for single fleets by name or `project/name`."""

    everywhere: Offer = attrs.Factory(Offer)
    fleets: Mapping[str, Offer] = attrs.Factory(dict)
    allow_downgrade: bool = False

    def __bool__(self) -> bool:
        return self.everywhere != Offer() or bool(self.fleets)

    def offer(self, project: str, fleet: str) -> Offer:
        """Return the offer for a fleet's instances."""
        for name in (f"{project}/{fleet}", fleet):
            if name in self.fleets:
                return self.fleets[name]
        return self.everywhere

    def document(self) -> str:
        """Write it as JSON: the same choice is always the same text."""
        return json.dumps(attrs.asdict(self), sort_keys=True)

    @property
    def digest(self) -> str:
        """What two replicas compare."""
        return hashlib.sha256(self.document().encode()).hexdigest()


def read_document(text: str) -> Choice:
    """Read back what `Choice.document` wrote."""
    document = json.loads(text)
    return Choice(
        everywhere=Offer(**document["everywhere"]),
        fleets={name: Offer(**offer) for name, offer in document["fleets"].items()},
        allow_downgrade=document["allow_downgrade"],
    )


def is_downgrade(installed: str, offered: str) -> bool:
    """Say whether a version lies before the installed one; one that cannot be compared does not."""
    old, new = parse_version(installed), parse_version(offered)
    return old is not None and new is not None and new < old


# From the environment ----------------------------------------------------------------------------


def read_version(text: str) -> str:
    """Check a version. Raises ValueError if dstack could not compare it."""
    if parse_version(text) is None:
        raise ValueError(text)
    return text


def read_url(text: str) -> str:
    """Check a template of a download URL. Raises ValueError."""
    # Kept in the record and logged by servers, so no place for a password.
    if not text.startswith(("http://", "https://")) or "@" in urlsplit(text).netloc:
        raise ValueError(text)
    # Each part is (text, field, format, conversion); a broken brace raises ValueError by itself.
    for _, field, form, conversion in string.Formatter().parse(text):
        if field is not None and (field not in _PLACES or form or conversion):
            raise ValueError(text)
    return text


def read_sha256(text: str) -> Mapping[str, str]:
    """Read `HEX` or `amd64=HEX,arm64=HEX`. Raises ValueError."""
    digests = {}
    for part in text.lower().replace(" ", "").split(","):
        arch, _, digest = part.rpartition("=")
        if (arch and arch not in ARCHITECTURES) or not _SHA256.fullmatch(digest):
            raise ValueError(text)
        digests[arch] = digest
    return digests


def read_fleets(text: str) -> Mapping[str, Offer]:
    """Read a JSON object of fleets and their `version`, `url`, `sha256`. Raises ValueError."""
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError(text)  # noqa: TRY004  one error for all that is not understood
    return {name: _read_offer(offer) for name, offer in document.items()}


def _read_offer(document: Any) -> Offer:
    if not isinstance(document, dict) or not document.keys() <= _OFFER_KEYS:
        raise ValueError(document)
    if not all(isinstance(value, str) and value for value in document.values()):
        raise ValueError(document)
    return Offer(
        version=read_version(document["version"]) if "version" in document else "",
        url=read_url(document["url"]) if "url" in document else "",
        sha256=read_sha256(document["sha256"]) if "sha256" in document else {},
    )

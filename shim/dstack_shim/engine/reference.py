"""Image references: ``[registry/]name[:tag][@digest]``.

The grammar is that of the Docker Engine (distribution's reference format). dstack's own shim
looks for any colon, and so takes the port of ``host:5000/a`` for a tag.
"""

from __future__ import annotations

import re

import attrs

from dstack_shim.errors import PullFailed

DOCKER_HUB = "docker.io"
# The address under which credentials for Docker Hub have always been filed.
_DOCKER_HUB_LOGIN = "https://index.docker.io/v1/"

_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST = rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]+)?"
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = rf"(?:{_HOST}/)?{_COMPONENT}(?:/{_COMPONENT})*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_DIGEST = r"[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,512}"
_REFERENCE = re.compile(rf"({_NAME})(?::({_TAG}))?(?:@({_DIGEST}))?")
_LONGEST = 4096


@attrs.frozen
class Reference:
    """An image reference in its parts, as written: nothing is expanded or defaulted."""

    name: str
    tag: str | None = None
    digest: str | None = None

    @property
    def version(self) -> str:
        """What the engine is asked for: the digest if there is one, else the tag or latest."""
        return self.digest or self.tag or "latest"

    @property
    def moves(self) -> bool:
        """Whether a local copy may be out of date by convention: it is ``latest``."""
        return self.version == "latest"

    @property
    def registry(self) -> str:
        """The host (and port) the image comes from."""
        first, slash, _ = self.name.partition("/")
        named = slash and ("." in first or ":" in first or first == "localhost")
        # An upper-case letter cannot be in a path, so that first part is a host.
        return first if named or (slash and first != first.lower()) else DOCKER_HUB

    @property
    def login_address(self) -> str:
        """The server address that credentials for :attr:`registry` are filed under.

        The engine's containerd image store hands credentials only to the host named here.
        """
        hub = (DOCKER_HUB, "index.docker.io", "registry-1.docker.io")
        return _DOCKER_HUB_LOGIN if self.registry in hub else self.registry


def parse_reference(text: str) -> Reference:
    """Take a reference apart.

    Raises ``PullFailed`` if it is none: the text is the user's own and names what was expected.
    """
    found = _REFERENCE.fullmatch(text) if len(text) <= _LONGEST else None
    if found is None:
        raise PullFailed(
            f"image_name: {text[:200]!r} is not an image reference; "
            "expected [registry/]name[:tag][@digest], the name in lower case"
        )
    name, tag, digest = found.groups()
    return Reference(name, tag, digest)

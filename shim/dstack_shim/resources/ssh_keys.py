"""Public keys and the lines of ``authorized_keys`` that are ours. Pure: bytes in, bytes out.

The wire format of a key is that of RFC 4253 section 6.6 (rsa, dss), RFC 5656 (ecdsa),
RFC 8709 (ed25519) and OpenSSH's PROTOCOL.u2f (sk-…).
"""

from __future__ import annotations

import base64
import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

from attrs import frozen

MARKER = "# added by dstack-shim"
_MARKED = b" " + MARKER.encode()


class BadKey(ValueError):
    """Not one well-formed public key; the text never quotes it, only says what is wrong."""


@frozen
class PublicKey:
    """One public key without options."""

    kind: str
    blob: bytes
    comment: str = ""

    @property
    def fingerprint(self) -> str:
        """As ``ssh-keygen -l`` shows it."""
        digest = base64.b64encode(hashlib.sha256(self.blob).digest()).decode()
        return "SHA256:" + digest.rstrip("=")

    @property
    def line(self) -> bytes:
        """The line that stands for it in ``authorized_keys``, with our marker."""
        words = (self.kind, base64.b64encode(self.blob).decode(), self.comment, MARKER)
        return " ".join(word for word in words if word).encode()


@frozen
class Merged:
    """A file with our lines as they should be, and what that changed, by fingerprint."""

    content: bytes
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def parse_key(text: str) -> PublicKey:
    """Read one public key, rebuilt from its parts: ``type base64 [comment …]``.

    Raises ``BadKey``: options, certificates, two keys, control characters, another type inside.
    """
    text = text.strip(" \t\r\n")
    if any(unicodedata.category(char) in {"Cc", "Cs"} for char in text.replace("\t", " ")):
        raise BadKey("more than one line, or characters that cannot be in a key")
    words = [word for word in re.split(r"[ \t]+", text) if word]
    if len(words) < 2:
        raise BadKey("expected a type and a base64 text")
    kind, encoded, *comment = words
    if kind.endswith("-cert-v01@openssh.com"):
        raise BadKey("a certificate, expected a plain public key")
    if kind not in _SHAPES:
        raise BadKey("does not begin with a known key type (options are not allowed)")
    try:
        blob = base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise BadKey(f"{kind}: not base64") from error
    fields = _fields(kind, blob)
    if fields[:1] != [kind.encode()]:
        raise BadKey(f"{kind}: the key inside is of another type")
    if not _SHAPES[kind](fields[1:]):
        raise BadKey(f"{kind}: malformed key")
    return PublicKey(kind, blob, " ".join(comment))


def is_ours(line: bytes) -> bool:
    """Whether a line of ``authorized_keys`` carries our marker (design: the ownership test)."""
    return line.rstrip(b" \t\r").endswith(_MARKED)


def marked(content: bytes) -> tuple[str, ...]:
    """The fingerprints on our lines, in file order; ``unreadable`` for a line without a key."""
    return tuple(_fingerprint(line) for line in _lines(content) if is_ours(line))


def merge(old: bytes, wanted: Iterable[PublicKey]) -> Merged:
    """``old`` with exactly ``wanted`` on our lines, which come last, one per fingerprint.

    The first of two keys with one fingerprint gives the comment. Every other line stays byte
    for byte; only a missing newline at the end is added. With nothing of ours before and
    nothing wanted the file is not touched at all.
    """
    keys: dict[str, PublicKey] = {}
    for key in wanted:
        keys.setdefault(key.fingerprint, key)
    before = marked(old)
    if not before and not keys:
        return Merged(old)
    foreign = [line for line in _lines(old) if not is_ours(line)]
    lines = [*foreign, *(key.line for key in keys.values())]
    return Merged(
        content=b"".join(line + b"\n" for line in lines),
        added=tuple(fingerprint for fingerprint in keys if fingerprint not in before),
        removed=tuple(dict.fromkeys(item for item in before if item not in keys)),
    )


def _lines(content: bytes) -> list[bytes]:
    # Only a line feed ends a line, for sshd too; a carriage return belongs to its line.
    lines = content.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def _fingerprint(line: bytes) -> str:
    text = line.rstrip(b" \t\r")[: -len(_MARKED)].decode("utf-8", errors="replace")
    try:
        return parse_key(text).fingerprint
    except BadKey:
        return "unreadable"


def _fields(kind: str, blob: bytes) -> list[bytes]:
    """Cut a blob into its length-prefixed strings (RFC 4251 section 5)."""
    fields, at = [], 0
    while at < len(blob):
        start = at + 4
        at = start + int.from_bytes(blob[at:start], "big")
        if at > len(blob):
            raise BadKey(f"{kind}: the key is cut off")
        fields.append(blob[start:at])
    return fields


def _is_number(field: bytes) -> bool:
    return field.strip(b"\0") != b"" and field[0] < 0x80


def _numbers(count: int) -> Callable[[Sequence[bytes]], bool]:
    return lambda fields: len(fields) == count and all(map(_is_number, fields))


def _is_point(curve: str, field: bytes) -> bool:
    size = (int(curve.removeprefix("nistp")) + 7) // 8
    return len(field) == 1 + 2 * size and field[0] == 4  # uncompressed, as OpenSSH writes it


def _ecdsa(curve: str) -> Callable[[Sequence[bytes]], bool]:
    def fits(fields: Sequence[bytes]) -> bool:
        return len(fields) == 2 and fields[0] == curve.encode() and _is_point(curve, fields[1])

    return fits


def _ed25519(fields: Sequence[bytes]) -> bool:
    return len(fields) == 1 and len(fields[0]) == 32


def _on_token(
    fits: Callable[[Sequence[bytes]], bool],
) -> Callable[[Sequence[bytes]], bool]:
    return lambda fields: len(fields) > 1 and fits(fields[:-1])  # the last is the application


_SHAPES: dict[str, Callable[[Sequence[bytes]], bool]] = {
    "ssh-rsa": _numbers(2),
    "ssh-dss": _numbers(4),
    "ssh-ed25519": _ed25519,
    "sk-ssh-ed25519@openssh.com": _on_token(_ed25519),
    "ecdsa-sha2-nistp256": _ecdsa("nistp256"),
    "ecdsa-sha2-nistp384": _ecdsa("nistp384"),
    "ecdsa-sha2-nistp521": _ecdsa("nistp521"),
    "sk-ecdsa-sha2-nistp256@openssh.com": _on_token(_ecdsa("nistp256")),
}

"""Fetching a program over HTTP into a file: all of it, or a reason why not.

Errors never show more of a URL than its origin and path: what follows the question mark is
often a signature.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import urlsplit

import requests
from attrs import frozen
from urllib3.exceptions import HTTPError, ReadTimeoutError

from dstack_shim.errors import ComponentError
from dstack_shim.host.threads import call_in_thread
from dstack_shim.staged import MODE

TIMEOUT = 600.0
"""Seconds a download may take, whatever it is waiting for."""

MAX_SIZE = 1 << 30
"""Bytes of content accepted: an endless body must not fill the disk."""

RECENT = 600.0
"""Seconds in which a server without validators is taken at its word that nothing changed."""

_CONNECT = 10.0  # s
_SILENCE = 60.0  # s without a byte
_CHUNK = 1 << 16
_PREFIX = 1 << 16  # bytes that, with the length, tell two builds apart

# Where Linux distributions keep the roots of trust; requests' own copy ages with the build.
_CA_FILES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


@frozen
class Fetched:
    """A content that was fetched, and what tells it from a newer one at the same URL."""

    sha256: str
    size: int
    prefix_sha256: str
    length: str  # Content-Length, "" if not given
    etag: str
    last_modified: str
    at: float  # monotonic s


class Fetch(Protocol):
    """How a content is fetched: :func:`fetch`, or a test's own."""

    async def __call__(
        self, url: str, path: Path, *, known: Fetched | None = None
    ) -> Fetched | None:
        """Fetch ``url`` into ``path``; arguments and errors are those of :func:`fetch`."""
        ...


async def fetch(url: str, path: Path, *, known: Fetched | None = None) -> Fetched | None:
    """Write the content of ``url`` into the existing file ``path`` and flush it.

    None if it is still the ``known`` content: then nothing, or only its beginning, was
    fetched. A cancelled caller does not wait: the file may be removed at once.

    Raises:
        ComponentError: there is no answer, another one than 200, a body shorter than
            announced, one in an encoding we did not ask for, no space for it, no end to it.
    """
    cancelled = threading.Event()
    download = _Download(url, path, known, cancelled)
    try:
        return await call_in_thread(
            download.run, name="download", cancelled=cancelled, timeout=TIMEOUT
        )
    except asyncio.TimeoutError as error:
        raise ComponentError(f"{shown(url)}: not fetched within {TIMEOUT:g} s") from error
    except RuntimeError as error:
        raise ComponentError(f"{shown(url)}: {error}") from error


def shown(url: str) -> str:
    """Return the part of a URL that is fit for a log."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "the URL"
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


class _Stopped(Exception):
    """Nobody waits for this download any more."""


class _Download:
    """One download, driven from its own thread."""

    def __init__(
        self, url: str, path: Path, known: Fetched | None, cancelled: threading.Event
    ) -> None:
        self._url = url
        self._path = path
        self._known = known
        self._cancelled = cancelled

    def run(self) -> Fetched | None:
        try:
            if urlsplit(self._url).scheme not in {"http", "https"}:
                raise ComponentError(f"{shown(self._url)}: expected a http or https URL")
            with requests.Session() as session, self._ask(session) as response:
                return self._receive(response)
        except (requests.RequestException, HTTPError) as error:
            raise ComponentError(f"{shown(self._url)}: {_reason(error)}") from error
        except ValueError as error:
            raise ComponentError(f"{shown(self._url)}: not a valid URL") from error
        except OSError as error:
            raise ComponentError(
                f"{shown(self._url)} could not be written down: {error.strerror or error}"
            ) from error

    def _ask(self, session: requests.Session) -> requests.Response:
        headers = {"Accept-Encoding": "gzip"}
        if self._known is not None and self._known.etag:
            headers["If-None-Match"] = self._known.etag
        if self._known is not None and self._known.last_modified:
            headers["If-Modified-Since"] = self._known.last_modified
        return session.get(
            self._url,
            headers=headers,
            stream=True,
            timeout=(_CONNECT, _SILENCE),
            auth=_without_auth,
            verify=_trust(),
        )

    def _receive(self, response: requests.Response) -> Fetched | None:
        if response.status_code == 304 and self._known is not None:
            return None
        if response.status_code != 200:
            raise ComponentError(
                f"{shown(self._url)}: the server answered "
                f"{response.status_code} {response.reason or ''}".rstrip()
            )
        if self._known is not None and _same_by_validators(self._known, response):
            return None
        with self._path.open("r+b") as file:
            return self._store(response, file)

    def _store(self, response: requests.Response, file: BinaryIO) -> Fetched | None:
        digest = hashlib.sha256()
        beginning = bytearray()
        size = 0
        compared = False
        for block in self._content(response):
            size += len(block)
            if size > MAX_SIZE:
                raise ComponentError(f"{shown(self._url)}: over {MAX_SIZE} bytes")
            beginning += block[: _PREFIX - len(beginning)]
            if not compared and len(beginning) == _PREFIX:
                compared = True
                if self._same_by_beginning(response, beginning):
                    return None
            digest.update(block)
            file.write(block)
        if not compared and self._same_by_beginning(response, beginning):
            return None
        file.flush()
        os.fchmod(file.fileno(), MODE)
        os.fsync(file.fileno())
        return Fetched(
            sha256=digest.hexdigest(),
            size=size,
            prefix_sha256=hashlib.sha256(beginning).hexdigest(),
            length=response.headers.get("Content-Length", ""),
            etag=response.headers.get("ETag", ""),
            last_modified=response.headers.get("Last-Modified", ""),
            at=time.monotonic(),
        )

    def _same_by_beginning(self, response: requests.Response, beginning: bytearray) -> bool:
        """Tell an unchanged content of a server that gives nothing to tell it by.

        Servers up to 0.22.0 ask for an install at every check while version strings differ.
        """
        known = self._known
        return (
            known is not None
            and not known.etag
            and not known.last_modified
            and known.length != ""
            and known.length == response.headers.get("Content-Length")
            and known.prefix_sha256 == hashlib.sha256(beginning).hexdigest()
            and time.monotonic() - known.at < RECENT
        )

    def _content(self, response: requests.Response) -> Iterator[bytes]:
        """Yield the decoded body; raise if it ends before it should."""
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding in {"identity", ""}:
            yield from self._body(response)
        elif encoding in {"gzip", "x-gzip"}:
            yield from self._gunzip(response)
        else:
            raise ComponentError(f"{shown(self._url)}: unexpected content encoding")

    def _gunzip(self, response: requests.Response) -> Iterator[bytes]:
        decoder = zlib.decompressobj(wbits=31)
        try:
            for chunk in self._body(response):
                data = chunk
                while data and not decoder.eof:
                    yield decoder.decompress(data, _CHUNK * 16)  # no more in memory at once
                    data = decoder.unconsumed_tail
            while rest := decoder.decompress(b"", _CHUNK * 16):
                yield rest
        except zlib.error as error:
            raise ComponentError(f"{shown(self._url)}: damaged gzip content") from error
        if not decoder.eof:
            raise ComponentError(f"{shown(self._url)}: the gzip content was cut short")

    def _body(self, response: requests.Response) -> Iterator[bytes]:
        received = 0
        # What is there, not a whole chunk: a body that comes by drops would keep this thread and
        # its connection for hours after everybody has given up.
        while chunk := response.raw.read1(_CHUNK, decode_content=False):
            if self._cancelled.is_set():
                raise _Stopped
            received += len(chunk)
            yield chunk
        announced = response.headers.get("Content-Length", "")
        # urllib3 checks it too, unless it is told not to; with chunks the header means nothing.
        chunked = "Transfer-Encoding" in response.headers
        if announced.isdigit() and not chunked and received != int(announced):
            raise ComponentError(
                f"{shown(self._url)}: the body ended after {received} of {announced} bytes"
            )


def _same_by_validators(known: Fetched, response: requests.Response) -> bool:
    """Tell an unchanged content where a server ignores conditions but gives validators."""
    headers = response.headers
    if known.etag and headers.get("ETag"):
        return known.etag == headers["ETag"]
    return (
        known.last_modified != ""
        and known.last_modified == headers.get("Last-Modified")
        and known.length == headers.get("Content-Length", "")
    )


def _without_auth(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Keep requests from sending what it finds in ~/.netrc."""
    return request


def _trust() -> bool | str:
    """Return the roots of trust: those the environment names, the system's, requests' own."""
    if os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE"):
        return True  # requests reads these itself
    return next((file for file in _CA_FILES if Path(file).is_file()), True)


def _reason(error: BaseException) -> str:
    """Say in a few words why there is no answer; the libraries' own texts contain the URL."""
    if isinstance(error, requests.ConnectTimeout):
        return f"no connection within {_CONNECT:g} s"
    if isinstance(error, (requests.Timeout, ReadTimeoutError)):
        return f"no data for {_SILENCE:g} s"
    if isinstance(error, requests.TooManyRedirects):
        return "too many redirects"
    cause = _innermost_os_error(error)
    if cause is not None:
        return cause.strerror or type(cause).__name__
    if isinstance(error, ValueError):  # what both libraries raise for one
        return "not a valid URL"
    if isinstance(error, HTTPError):
        return "the connection broke before the body was complete"
    return "the server did not answer in HTTP"


def _innermost_os_error(error: BaseException) -> OSError | None:
    """Follow the libraries' wrappings down to what the system said."""
    found: OSError | None = None
    current: object = error
    for _ in range(12):
        if isinstance(current, OSError) and not isinstance(current, requests.RequestException):
            found = current
        if not isinstance(current, BaseException):
            break
        inner = getattr(current, "reason", None)
        if not isinstance(inner, BaseException):
            inner = next((arg for arg in current.args if isinstance(arg, BaseException)), None)
        current = inner or current.__cause__ or current.__context__
    return found

"""The credentials of the suite, and a watch over the places where they must not turn up.

Every task of every case is submitted with a login, so that whatever becomes of a task has been
tried with one. All of them hold one token, which is found in any of its forms.
"""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.engine import Request
from tests.lab.beside import repeating

TOKEN = "Zq7conformanceK"

_READ_AT_MOST = 4 * 1024 * 1024  # bytes of one file: a shim's own are small, a job's may not be
_PASSES_IT = "x-registry-auth"


@dataclass(frozen=True)
class Login:
    """A user name and a password of a registry, both with the token in them."""

    username: str
    password: str

    @property
    def fields(self) -> dict[str, str]:
        """The two fields of a submit body."""
        return {"registry_username": self.username, "registry_password": self.password}


USUAL = Login(f"user-{TOKEN}", f"pass-{TOKEN}")
REGISTRY = Login(f"alice-{TOKEN}", f"s3cret-{TOKEN}/w0rd+=")
WRONG = Login(f"bob-{TOKEN}", f"wrong-{TOKEN}")
ODD = Login(f"carol-{TOKEN}", f"pä/s'\"$-{TOKEN}+s=")
NO_LOGIN = {"registry_username": "", "registry_password": ""}


def _encoded(token: bytes, before: int) -> bytes:
    """What base64 makes of the token with so many bytes before it, as far as it decides alone."""
    whole = base64.b64encode(bytes(before) + token)
    return whole[-(-before * 8 // 6) : (before + len(token)) * 8 // 6]


def _forms_of(token: str) -> tuple[bytes, ...]:
    """As it is, and in base64 wherever it begins there."""
    raw = token.encode()
    return raw, *(_encoded(raw, before) for before in range(3))


_FORMS = _forms_of(TOKEN)


def has_secret(text: bytes, forms: Iterable[bytes] = _FORMS) -> bool:
    """Whether a credential of the suite is in it, in any form."""
    return any(form in text for form in forms)


class Watch:
    """Looks at files below a folder, and at arguments and variables of all processes."""

    def __init__(self, folder: Path, *, leave_out: Iterable[str] = (), token: str = TOKEN) -> None:
        self.found: set[str] = set()
        self.looks = self.requests = 0
        self._folder = folder
        self._leave_out = frozenset(leave_out)
        self._forms = _forms_of(token)
        self._known: dict[str, tuple[int, int, int]] = {}
        self._lock = threading.Lock()

    def look(self) -> None:
        """Look once at everything, files that did not change excepted."""
        with self._lock:
            self._look_at(Path("/proc").glob("[0-9]*/cmdline"))
            self._look_at(Path("/proc").glob("[0-9]*/environ"))
            self._look_at(self._changed_files())
            self.looks += 1

    def told(self, request: Request) -> None:
        """Look at what the engine is told: labels, variables and commands of containers."""
        self.requests += 1
        headers = {key: text for key, text in request.headers.items() if key != _PASSES_IT}
        if has_secret(f"{request.target} {headers}".encode() + request.body, self._forms):
            self.found.add(f"the engine was told: {request.method} {request.path}")

    def _look_at(self, places: Iterable[Path]) -> None:
        for place in places:
            with suppress(OSError):  # gone meanwhile
                with place.open("rb") as file:
                    content = file.read(_READ_AT_MOST)
                if has_secret(content, self._forms):
                    self.found.add(str(place))

    def _changed_files(self) -> Iterator[Path]:
        for at, folders, names in os.walk(self._folder):
            folders[:] = [
                # Not into what is mounted there: a look would keep it from being unmounted.
                name
                for name in folders
                if name not in self._leave_out and not os.path.ismount(Path(at, name))
            ]
            for name in names:
                place = Path(at, name)
                with suppress(OSError):
                    status = place.lstat()
                    version = (status.st_ino, status.st_mtime_ns, status.st_size)
                    if place.is_file() and self._known.get(str(place)) != version:
                        self._known[str(place)] = version
                        yield place


@contextmanager
def watching(watch: Watch, every: float = 0.1) -> Iterator[Watch]:
    """Look again and again, beside the cases."""
    with repeating(watch.look, every):
        yield watch

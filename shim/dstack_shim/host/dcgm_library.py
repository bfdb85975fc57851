"""NVIDIA's libdcgm, called in a process of its own: a vendor's crash must not be the shim's.

Run by :mod:`dstack_shim.host.dcgm_health` as a program, from memory; so the standard library
is all it may use, and nothing of ours. Arguments: the address of an nv-hostengine ("" for one
inside this process), then the names of the library to try. For each line on stdin it answers
one line of JSON on stdout: the health, or ``{"error": ...}``, or ``{"absent": ...}`` when
there is no library at all. It ends with its input.

Structures and numbers are those of the public headers of DCGM 2.0 to 4.6.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

_OK = 0
_VERSION_MISMATCH = -12
_AUTOMATIC = 1  # the embedded engine collects by itself
_ALL_GPUS = 0x7FFFFFFF
_ALL_SYSTEMS = 0xFFFFFFFF
_MAX_INCIDENTS = {5: 1024, 4: 64}  # by version of the response: DCGM 4, DCGM 2 and 3


class _Incident(ctypes.Structure):
    _fields_ = (
        ("system", ctypes.c_uint),
        ("health", ctypes.c_uint),
        ("message", ctypes.c_char * 1024),
        ("code", ctypes.c_uint),
        ("group", ctypes.c_uint),
        ("entity", ctypes.c_uint),
    )


class _Response5(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("overall", ctypes.c_uint),
        ("count", ctypes.c_uint),
        ("incidents", _Incident * _MAX_INCIDENTS[5]),
    )


class _Response4(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("overall", ctypes.c_uint),
        ("count", ctypes.c_uint),
        ("incidents", _Incident * _MAX_INCIDENTS[4]),
    )


class DcgmError(Exception):
    """A call into the library failed."""


class NoLibrary(Exception):
    """The library is not installed."""


class Dcgm:
    """A session with a host engine that watches the health of all GPUs."""

    def __init__(self, names: list[str], address: str) -> None:
        self._library = _load(names)
        self._handle = ctypes.c_size_t()
        self._call("dcgmInit")
        if address:
            engine = address.encode()
            self._call("dcgmConnect", ctypes.c_char_p(engine), ctypes.byref(self._handle))
        else:
            mode = ctypes.c_uint(_AUTOMATIC)
            self._call("dcgmStartEmbedded", mode, ctypes.byref(self._handle))
        self._group = ctypes.c_size_t(_ALL_GPUS)
        self._call("dcgmHealthSet", self._handle, self._group, ctypes.c_uint(_ALL_SYSTEMS))

    def check(self) -> dict[str, object]:
        """Return what the watches have found since the last time, in the shape of the API."""
        newest = self._check(_Response5(), 5)
        response = newest if newest is not None else self._check(_Response4(), 4)
        if response is None:
            raise DcgmError("dcgmHealthCheck: the library has another version of the response")
        if response.count > len(response.incidents):
            raise DcgmError("dcgmHealthCheck: more incidents than the response has room for")
        return {
            "overall_health": response.overall,
            "incidents": [_described(one) for one in response.incidents[: response.count]],
        }

    def _check(
        self, response: _Response5 | _Response4, version: int
    ) -> _Response5 | _Response4 | None:
        response.version = ctypes.sizeof(response) | version << 24
        code = self._library.dcgmHealthCheck(self._handle, self._group, ctypes.byref(response))
        if code == _VERSION_MISMATCH:
            return None
        self._expect_ok("dcgmHealthCheck", code)
        return response

    def _call(self, name: str, *arguments: object) -> None:
        self._expect_ok(name, getattr(self._library, name)(*arguments))

    def _expect_ok(self, name: str, code: int) -> None:
        if code == _OK:
            return
        words = ""
        describe = getattr(self._library, "errorString", None)
        if describe is not None:
            describe.restype = ctypes.c_char_p
            words = (describe(code) or b"").decode(errors="replace")
        raise DcgmError(f"{name}: {words or 'code'} ({code})")


def _load(names: list[str]) -> ctypes.CDLL:
    reasons = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    raise NoLibrary("; ".join(reasons))


def _described(incident: _Incident) -> dict[str, object]:
    return {
        "system": incident.system,
        "health": incident.health,
        "error_message": incident.message.decode(errors="replace"),
        "error_code": incident.code,
        "entity_group_id": incident.group,
        "entity_id": incident.entity,
    }


def main() -> None:
    """Answer until the input ends."""
    address, *names = sys.argv[1:]
    # The library may print to stdout, which carries our answers: give it stderr instead.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    session: Dcgm | None = None
    for _ in sys.stdin:
        try:
            session = session or Dcgm(names, address)
            answer = session.check()
        except NoLibrary as error:
            answer = {"absent": str(error)}
        except Exception as error:  # noqa: BLE001 - all of it is the library's; it may lack functions
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if session is None or "error" in answer:
            break  # a new process starts from scratch, with a new connection
    os._exit(0)  # the library's own threads and exit handlers are not waited for


if __name__ == "__main__":
    main()

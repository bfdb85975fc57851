"""What is fuzzed: everything that reads bytes somebody else wrote.

A target takes any bytes. It raises nothing where only the documented errors came, and what it
asserts held; anything else is a find.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
from dstack_shim_contracts import golden
from dstack_shim_contracts.api import (
    ComponentInstallRequest,
    ShutdownRequest,
    TaskConfig,
    TerminateRequest,
)
from dstack_shim_contracts.codec import decode, encode, validate_submit
from dstack_shim_contracts.errors import BodyError, RecordError
from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.record import read_record, write_record

from dstack_shim.engine.pull import PullStream
from dstack_shim.engine.runner_command import RunnerFlags, runner_command
from dstack_shim.errors import PullFailed
from dstack_shim.resources.ssh_keys import BadKey, is_ours, marked, merge, parse_key

FINDS = Path(__file__).parent / "finds"
Target = Callable[[bytes], None]
REQUESTS = (ShutdownRequest, ComponentInstallRequest, TerminateRequest, TaskConfig)


def record(raw: bytes) -> None:
    """``task.json``: what can be read can be written, and is then the same for ever."""
    try:
        read = read_record(raw)
        written = write_record(read)
    except RecordError:
        return
    again = read_record(written)
    assert again == attrs.evolve(read, terminated=again.terminated)
    assert write_record(again) == written


def request(raw: bytes) -> None:
    """Bodies: one that is accepted says the same when it is sent on; names are one path part."""
    for shape in REQUESTS:
        try:
            body = decode(shape, raw)
        except BodyError:
            continue
        assert decode(shape, encode(body)) == body
        if isinstance(body, TaskConfig):
            _submit(body)


def _submit(config: TaskConfig) -> None:
    try:
        validate_submit(config)
    except BodyError:
        return
    name = container_name(config.name, config.id)
    assert "/" not in name
    assert "\0" not in name
    assert not name.startswith(".")
    keys = config.container_ssh_keys or ()
    command = runner_command(
        RunnerFlags(), version="0.22.5", on_host_network=True, ssh_keys=tuple(keys)
    )
    assert "\0" not in command


def pull(raw: bytes) -> None:
    """A pull's stream, cut where its own first bytes say: sums never fall, the end is told."""
    stream = PullStream(None)
    step = (raw[0] if raw else 0) + 1
    before = (0, 0, 0)
    for at in range(0, len(raw), step):
        stream.feed(raw[at : at + step])
        if (now := stream.progress) is not None:
            sums = (now.downloaded_bytes, now.extracted_bytes, now.total_bytes)
            assert all(new >= old for new, old in zip(sums, before, strict=True))
            encode(now)
            before = sums
    with contextlib.suppress(PullFailed):
        stream.finish()


def keys(raw: bytes) -> None:
    """``authorized_keys``: the first line is a key to add, the rest the file."""
    text, _, old = raw.partition(b"\n")
    wanted = []
    with contextlib.suppress(BadKey):
        wanted.append(parse_key(text.decode("utf-8", "surrogateescape")))
    merged = merge(old, wanted)
    assert _foreign(merged.content) == _foreign(old)
    assert marked(merged.content) == tuple(key.fingerprint for key in wanted)
    assert merge(merged.content, wanted).content == merged.content
    assert _foreign(merge(merged.content, []).content) == _foreign(old)


def _foreign(content: bytes) -> list[bytes]:
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    return [line for line in lines if not is_ours(line)]


TARGETS: dict[str, Target] = {"record": record, "request": request, "pull": pull, "keys": keys}


def seeds(name: str) -> Iterator[bytes]:
    """Sound input to begin with, and what was found before."""
    yield from (path.read_bytes() for path in sorted((FINDS / name).glob("*")))
    kinds = {
        "record": ("task-record",),
        "request": ("task-submit", "task-terminate", "shutdown", "component-install"),
    }
    for kind in kinds.get(name, ()):
        yield from (example.raw for example in (*golden.good(kind), *golden.bad(kind)))
    if name == "pull":
        yield PULL
    if name == "keys":
        yield KEY + b"\nssh-rsa AAAA other\n" + KEY + b" # added by dstack-shim\n"


KEY = b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f a b"
PULL = b"""{"status":"Pulling from a","id":"1"}\r
{"status":"Downloading","progressDetail":{"current":5,"total":10},"id":"b"}\r
{"status":"Extracting","progressDetail":{"current":1,"units":"s"},"id":"b"}\r
{"status":"Pull complete","progressDetail":{},"id":"b"}\r
{"errorDetail":{"message":"m"},"error":"m"}\r
{"status":"Status: Downloaded newer image for a:1"}\r
"""

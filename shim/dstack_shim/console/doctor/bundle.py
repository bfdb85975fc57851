"""``doctor --bundle FILE``: what somebody who helps needs to see, and nothing secret.

Left out are all keys, all output of jobs (messages are its last lines), and whatever another shim
wrote in a form unknown here: it may hold anything. Credentials are in no record and no log.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from dstack_shim.console.doctor.facts import Facts
from dstack_shim.console.log_lines import LOOKED_AT, last_lines, parse
from dstack_shim.console.screen import as_json
from dstack_shim.engine.protocol import Container
from dstack_shim.errors import ShimError
from dstack_shim.records import FoundDir

_SECRET = re.compile(r"(?i)(pass(word|wd)?|secret|token|credential|authorization|api_?key)")
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_OUTPUT = frozenset({"message", "trace", "last_words"})  # fields that may quote a job's output


def write_bundle(path: Path, facts: Facts, document: Mapping[str, object]) -> None:
    """Write the archive; the file is new and its owner's alone.

    Raises ``ShimError``.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, content in _members(facts, document):
                _add(archive, name, content)
    except OSError as error:
        raise ShimError(f"--bundle: cannot write {path}: {error.strerror}") from error


def _members(facts: Facts, document: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    yield "doctor.json", as_json(document)
    if facts.sources is None:
        return
    for found in facts.sources.found:
        yield f"records/{found.name}.json", as_json(record_document(found))
    boxes = [container_document(box) for box in facts.sources.containers or ()]
    yield "containers.json", as_json(boxes)
    shim = facts.sources.shim
    health = None if shim is None else attrs.asdict(shim.healthcheck)
    yield "healthcheck.json", as_json(health)
    yield "upgrade.json", as_json(attrs.asdict(facts.upgrade, value_serializer=_plain))
    yield "shim.log", "\n".join(_log(facts.sources.home / "shim.log")) + "\n"


def record_document(found: FoundDir) -> dict[str, object]:
    """A record without keys, output, and what is not known here."""
    record = found.record
    if record is None:
        return {"kind": found.kind.value, "problem": found.problem}
    config = attrs.asdict(record.config)
    for name in ("registry_username", "registry_password"):
        del config[name]
    for name in ("host_ssh_keys", "container_ssh_keys"):
        config[name] = f"{len(config[name])} left out"
    return {
        "kind": found.kind.value,
        "id": record.id,
        "config": config,
        "termination_reason": record.termination_reason,
        "termination_message": left_out(record.termination_message),
        "cleaned_up": record.cleaned_up,
        "terminated": record.terminated,
        "intent": attrs.asdict(record.intent, value_serializer=_plain) if record.intent else None,
        "boot_id": record.boot_id,
        "gpus": record.gpus,
        "stop_by": record.stop_by,
        "ended_at": record.ended_at,
        "written_by": record.written_by,
    }


def container_document(container: Container) -> dict[str, object]:
    """A container without its environment, which holds the user's secrets."""
    return {
        "id": container.id,
        "name": container.name,
        "state": container.state.value,
        "created": container.created,
        "task": container.task_id,
        "home": container.home,
        "network": container.network_mode,
        "mounts": [attrs.asdict(mount) for mount in container.mounts],
    }


def left_out(text: str) -> str:
    """What stands for text of a job."""
    return f"{len(text)} characters left out" if text else ""


def log_line(line: str) -> str | None:
    """A line of the log without output of jobs; None for one of a form unknown here."""
    event = parse(line)
    if not event.name:
        return None
    words = [event.time, event.level.upper(), event.name]
    for name, text in event.fields.items():
        secret = name in _OUTPUT or _SECRET.search(name)
        shown = left_out(text) if secret else _URL_LOGIN.sub("", text)
        words.append(f"{name}={json.dumps(shown)}")
    return " ".join(words)


def _log(path: Path) -> list[str]:
    try:
        lines, _ = last_lines(path, LOOKED_AT)
        kept = [fit for line in lines if (fit := log_line(line)) is not None]
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    return kept[::-1]


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode("utf-8", "replace")
    member = tarfile.TarInfo(f"dstack-shim-support/{name}")
    member.size, member.mtime, member.mode = len(content), int(time.time()), 0o600
    archive.addfile(member, io.BytesIO(content))


def _plain(_owner: object, _field: object, value: object) -> object:
    return str(value) if isinstance(value, str) else value

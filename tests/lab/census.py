"""What must hold on a host whenever the dust has settled, checked from outside the shim.

The numbers are those of the invariants in the design (the census). A violation is a sentence;
no sentence means that all of them hold. Nothing here imports the shim: its files are read as
any other program would read them.
"""

from __future__ import annotations

import http.client
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import docker

VOLUMES = "/mnt/disks/dstack-volumes/"
MARKER = " # added by dstack-shim"
_LABEL = "ai.dstack.shim."
_ESCAPE = re.compile(r"\\([0-7]{3})")  # how the kernel writes space, tab, newline and backslash
_ORDER = ("pending", "preparing", "pulling", "creating", "running", "terminated")

Ask = Callable[[str], Any]
"""GET a path of the shim's API and return its JSON."""


def asker(port: int) -> Ask:
    """Asks the shim on that port of loopback."""

    def ask(path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=9)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise AssertionError(f"GET {path}: {answer.status} {body!r}")
        return json.loads(body)

    return ask


class Census:
    """Watches one host. Tell it what the server did; take it when the dust has settled.

    ``key_files`` are the authorized_keys of the users that tasks name. What lies there and in
    ``runners/`` at the beginning is taken as foreign.
    """

    def __init__(
        self,
        home: Path,
        client: docker.APIClient,
        ask: Ask,
        *,
        key_files: Mapping[str, Path] | None = None,
    ) -> None:
        self._home = home
        self._client = client
        self._ask = ask
        self._key_files = dict(key_files or {})
        self._foreign_dirs = {path.name for path in self._dirs() if _record(path) is None}
        self._foreign_lines = {
            user: _foreign(_lines(path)) for user, path in self._key_files.items()
        }
        self._accepted: set[str] = set()
        self._seen: dict[str, tuple[str, str, str]] = {}

    def accepted(self, task_id: str) -> None:
        """A submit of this task was answered with 200."""
        self._accepted.add(task_id)

    def removed(self, task_id: str) -> None:
        """A remove of this task was answered with 200."""
        self._accepted.discard(task_id)
        self._seen.pop(task_id, None)

    def take(self) -> list[str]:
        """Every invariant that does not hold."""
        tasks = {
            item["id"]: self._ask(f"/api/tasks/{item['id']}")
            for item in self._ask("/api/tasks")["tasks"]
        }
        records = {
            record["id"]: record
            for path in self._dirs()
            if (record := _record(path)) is not None and isinstance(record.get("id"), str)
        }
        return [
            *self._gpus(tasks, records),
            *self._mounts(records),
            *self._keys(records),
            *self._containers(tasks),
            *self._task_dirs(tasks),
            *self._history(tasks),
        ]

    def secrets(self, *words: str) -> list[str]:
        """7. No credential in any file, log line, process argument or label."""
        found = []
        for path in self._home.rglob("*"):
            if path.is_file() and not path.is_symlink():
                content = path.read_bytes()
                found += [f"{path} holds {word!r}" for word in words if word.encode() in content]
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                content = path.read_bytes()
                found += [f"{path}: {content!r}" for word in words if word.encode() in content]
        for container in self._client.containers(all=True):
            text = json.dumps(self._client.inspect_container(container["Id"]))
            found += [f"container {container['Id'][:12]} has {w!r}" for w in words if w in text]
        return found

    def _gpus(self, tasks: Mapping[str, Any], records: Mapping[str, Any]) -> Iterable[str]:
        """1. No GPU under two tasks that are not released."""
        held = Counter(
            gpu
            for task_id, info in tasks.items()
            if not records.get(task_id, {}).get("cleaned_up") and info["status"] != "terminated"
            for gpu in info["gpus_ids"]
        )
        return [f"1: {gpu} is held by {count} tasks" for gpu, count in held.items() if count > 1]

    def _mounts(self, records: Mapping[str, Any]) -> Iterable[str]:
        """2. Mounts of volumes = volumes of tasks that are not released."""
        mounted = set(mounted_volumes())
        needed = {
            volume["name"]
            for record in records.values()
            if not record["cleaned_up"]
            for volume in record["config"].get("volumes") or ()
        }
        yield from (f"2: volume {name} is mounted for nobody" for name in mounted - needed)
        running = {
            volume["name"]
            for record in records.values()
            if not record["cleaned_up"] and not record["termination_reason"]
            for volume in record["config"].get("volumes") or ()
        }
        yield from (f"2: volume {name} is not mounted" for name in running - mounted)

    def _keys(self, records: Mapping[str, Any]) -> Iterable[str]:
        """3. Our marked lines = keys of tasks that are not released; other lines unchanged."""
        for user, path in self._key_files.items():
            lines = _lines(path)
            ours = {_blob(line) for line in lines if line.rstrip().endswith(MARKER.encode())}
            needed = {
                _blob(key.encode())
                for record in records.values()
                if not record["cleaned_up"] and record["config"].get("host_ssh_user") == user
                for key in record["config"].get("host_ssh_keys") or ()
            }
            yield from (f"3: {path} has a key of nobody: {blob!r}" for blob in ours - needed)
            yield from (f"3: {path} lacks the key {blob!r}" for blob in needed - ours)
            if _foreign(lines) != self._foreign_lines[user]:
                yield f"3: other lines of {path} were changed"

    def _containers(self, tasks: Mapping[str, Any]) -> Iterable[str]:
        """4. Running containers are of running tasks, at most one a task."""
        listed = self._client.containers(all=True, filters={"label": [f"{_LABEL}is-task=true"]})
        ours = [
            item
            for item in listed
            if item["Labels"].get(f"{_LABEL}home", str(self._home)) == str(self._home)
        ]
        count = Counter(item["Labels"].get(f"{_LABEL}task-id") for item in ours)
        yield from (f"4: task {task} has {n} containers" for task, n in count.items() if n > 1)
        for item in ours:
            task_id = item["Labels"].get(f"{_LABEL}task-id")
            status = tasks.get(task_id, {}).get("status", "unknown")
            if item["State"] in ("running", "paused", "restarting") and status != "running":
                yield f"4: container {item['Id'][:12]} runs, its task {task_id} is {status}"

    def _task_dirs(self, tasks: Mapping[str, Any]) -> Iterable[str]:
        """5. Task dirs = tasks, and what was there before."""
        known = {info["container_name"] for info in tasks.values()}
        there = {path.name for path in self._dirs()}
        extra = there - known - self._foreign_dirs
        yield from (f"5: directory {name} belongs to no task" for name in sorted(extra))
        lost = self._foreign_dirs - there
        yield from (f"5: directory {name} was not ours to remove" for name in sorted(lost))

    def _history(self, tasks: Mapping[str, Any]) -> Iterable[str]:
        """6. What was recorded stays; no task goes back; no accepted task is unknown."""
        yield from (f"6: task {task_id} is unknown" for task_id in self._accepted - tasks.keys())
        for task_id, info in tasks.items():
            now = (info["status"], info["termination_reason"], info["termination_message"])
            before = self._seen.get(task_id)
            if before is not None:
                if _ORDER.index(now[0]) < _ORDER.index(before[0]):
                    yield f"6: task {task_id} went from {before[0]} to {now[0]}"
                if before[1] and before[1:] != now[1:]:
                    yield f"6: task {task_id} changed its end from {before[1:]} to {now[1:]}"
            self._seen[task_id] = now

    def _dirs(self) -> list[Path]:
        runners = self._home / "runners"
        if not runners.is_dir():
            return []
        return [
            path
            for path in sorted(runners.iterdir())
            if path.is_dir() and not path.is_symlink() and not path.name.startswith(".")
        ]


def mounted_volumes() -> list[str]:
    """The names of the volumes that are mounted, one for each mount."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    points = [_ESCAPE.sub(lambda octal: chr(int(octal[1], 8)), line.split()[4]) for line in lines]
    return [point.removeprefix(VOLUMES) for point in points if point.startswith(VOLUMES)]


def _record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((path / "task.json").read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n") if path.exists() else []


def _foreign(lines: Iterable[bytes]) -> list[bytes]:
    return [line for line in lines if line and not line.rstrip().endswith(MARKER.encode())]


def _blob(line: bytes) -> bytes:
    return b" ".join(line.split()[:2])

"""The faults a broken shim can have, one class each, named by what a user would notice."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tests.conformance.engine import Reply, Request


@dataclass(frozen=True)
class Call:
    """A request to the shim."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, or an empty object where it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return {}


@dataclass(frozen=True)
class Answer:
    """What the shim answers."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, or None where it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def with_json(self, document: Any) -> Answer:
        """The same answer with another body."""
        return dataclasses.replace(self, body=json.dumps(document).encode())


class Fault:
    """No fault: everything is handed on as it is."""

    meddles_with_engine: ClassVar[bool] = False

    def __init__(self) -> None:
        self.home = Path()
        self.process = 0

    def prepare(self, environment: dict[str, str]) -> None:
        """Before the start."""

    def arguments(self, given: list[str]) -> list[str]:
        """What the real shim is started with."""
        return given

    def call(self, call: Call) -> Answer | None:
        """Answer a request instead of the shim."""

    def answer(self, call: Call, answer: Answer) -> Answer:
        """Change an answer of the shim."""
        return answer

    def engine_request(self, request: Request) -> Reply | Request | None:
        """Change or answer a request of the shim to its engine."""

    def engine_bytes(self, data: bytes) -> bytes:
        """Change what the engine answers; the length must stay."""
        return data

    def signalled(self) -> None:
        """When the shim is told to end."""

    def exit_code(self, code: int) -> int:
        """What the process ends with."""
        return code


# -- A ----------------------------------------------------------------------------------------


class HeadIsRefused(Fault):
    def answer(self, call: Call, answer: Answer) -> Answer:
        return dataclasses.replace(answer, status=405) if call.method == "HEAD" else answer


class JsonSaysText(Fault):
    def answer(self, call: Call, answer: Answer) -> Answer:
        headers = {"content-type": "text/html"} if answer.json is not None else answer.headers
        return dataclasses.replace(answer, headers=headers)


class SlashIsForgiven(Fault):
    def answer(self, call: Call, answer: Answer) -> Answer:
        is_slash = answer.status == 404 and call.path.endswith("/")
        return dataclasses.replace(answer, status=200) if is_slash else answer


class SecondSubmitIsFine(Fault):
    def answer(self, call: Call, answer: Answer) -> Answer:
        is_second = call.path == "/api/tasks" and answer.status == 409
        return dataclasses.replace(answer, status=200) if is_second else answer


class FloatIsAnInteger(Fault):
    def answer(self, call: Call, answer: Answer) -> Answer:
        is_float = any(value == 1.0 and type(value) is float for value in _values(call.json))
        return dataclasses.replace(answer, status=200) if is_float else answer


class ReasonIsNull(Fault):
    def answer(self, call: Call, answer: Answer) -> Answer:
        info = _info(answer)
        if info is None or info["termination_reason"]:
            return answer
        return answer.with_json(info | {"termination_reason": None})


class WaitsForNothing(Fault):
    """Terminate answers at once and goes on behind it."""

    def call(self, call: Call) -> Answer | None:
        if not call.path.endswith("/terminate"):
            return None
        info = dict.fromkeys(("termination_reason", "termination_message", "id"), "x")
        body = json.dumps(info | {"status": "terminated"}).encode()
        return Answer(200, {"content-type": "application/json"}, body)


# -- S ----------------------------------------------------------------------------------------


class LastReasonWins(Fault):
    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, str] = {}

    def answer(self, call: Call, answer: Answer) -> Answer:
        info = _info(answer)
        if info is None:
            return answer
        if call.path.endswith("/terminate"):
            self._last[info["id"]] = call.json.get("termination_reason") or ""
        last = self._last.get(info["id"], info["termination_reason"])
        return answer.with_json(info | {"termination_reason": last})


class ReasonNobodyKnows(Fault):
    def answer(self, call: Call, answer: Answer) -> Answer:
        text = answer.body.replace(b'"executor_error"', b'"internal_error"')
        return dataclasses.replace(answer, body=text)


class GraceIsIgnored(Fault):
    meddles_with_engine = True

    def engine_request(self, request: Request) -> Reply | Request | None:
        if re.search(r"^/containers/[^/]+/stop", request.path):
            target = re.sub(r"t=\d+", "t=0", request.target)
            return dataclasses.replace(request, target=target)
        return None


class StatusGoesBack(Fault):
    """Every second look at a running task finds it in creation again."""

    def __init__(self) -> None:
        super().__init__()
        self._looks = 0

    def answer(self, call: Call, answer: Answer) -> Answer:
        info = _info(answer)
        if info is None or info["status"] != "running":
            return answer
        self._looks += 1
        return answer.with_json(info | {"status": "creating"}) if self._looks % 2 == 0 else answer


# -- C ----------------------------------------------------------------------------------------


class _CreateFault(Fault):
    meddles_with_engine = True

    def engine_request(self, request: Request) -> Reply | Request | None:
        if request.method != "POST" or not request.path.startswith("/containers/create"):
            return None
        body = request.json
        self.change(body)
        return dataclasses.replace(request, body=json.dumps(body).encode())

    def change(self, body: dict[str, Any]) -> None:
        """Change what the container is created from."""


class LimitsAreForgotten(_CreateFault):
    def change(self, body: dict[str, Any]) -> None:
        body["HostConfig"] |= {"Memory": 0, "NanoCpus": 0, "NanoCPUs": 0}


class PortsForEverybody(_CreateFault):
    def change(self, body: dict[str, Any]) -> None:
        for bindings in (body["HostConfig"].get("PortBindings") or {}).values():
            for binding in bindings:
                binding["HostIp"] = ""


class SourcesAreMade(_CreateFault):
    """Mounts are asked for as binds, whose missing sources the engine makes."""

    def change(self, body: dict[str, Any]) -> None:
        mounts = body["HostConfig"].pop("Mounts", None) or []
        binds = [f"{mount['Source']}:{mount['Target']}" for mount in mounts]
        body["HostConfig"]["Binds"] = [*(body["HostConfig"].get("Binds") or []), *binds]


class AddressIsForgotten(_CreateFault):
    def change(self, body: dict[str, Any]) -> None:
        body["Cmd"] = [word.replace(" --http-address localhost", "") for word in body["Cmd"]]


class VolumesStay(Fault):
    meddles_with_engine = True

    def engine_request(self, request: Request) -> Reply | Request | None:
        if request.method != "DELETE":
            return None
        return dataclasses.replace(request, target=re.sub(r"\bv=\w+", "v=0", request.target))


# -- P ----------------------------------------------------------------------------------------


class SecondsAreBytes(Fault):
    meddles_with_engine = True

    def engine_bytes(self, data: bytes) -> bytes:
        return data.replace(b'"units"', b'"unitz"')


class ProgressVanishes(Fault):
    def answer(self, call: Call, answer: Answer) -> Answer:
        info = _info(answer)
        if info is None or info["status"] == "pulling":
            return answer
        return answer.with_json(info | {"image_pull_progress": None})


# -- D ----------------------------------------------------------------------------------------


class RecordIsReadable(Fault):
    def answer(self, call: Call, answer: Answer) -> Answer:
        for file in self.home.glob("runners/*/task.json"):
            file.chmod(0o644)
        return answer


class LogBeginsAnew(Fault):
    def prepare(self, environment: dict[str, str]) -> None:
        (self.home / "shim.log").unlink(missing_ok=True)


class PasswordInALabel(_CreateFault):
    def __init__(self) -> None:
        super().__init__()
        self._password = ""

    def call(self, call: Call) -> Answer | None:
        self._password = call.json.get("registry_password") or self._password
        return None

    def change(self, body: dict[str, Any]) -> None:
        body["Labels"]["ai.dstack.shim.debug"] = self._password


class DirsStay(Fault):
    """Remove keeps the task dir."""

    def call(self, call: Call) -> Answer | None:
        if call.path.endswith("/remove"):
            for folder in self.home.glob("runners/*"):
                (folder.parent.parent / "kept").mkdir(exist_ok=True)
                subprocess.run(["cp", "-a", folder, self.home / "kept"], timeout=10, check=False)
        return None

    def answer(self, call: Call, answer: Answer) -> Answer:
        if call.path.endswith("/remove") and answer.status == 200:
            for folder in self.home.glob("kept/*"):
                subprocess.run(
                    ["cp", "-a", folder, self.home / "runners"], timeout=10, check=False
                )
        return answer


# -- L ----------------------------------------------------------------------------------------


class UsageErrorsAreFine(Fault):
    def exit_code(self, code: int) -> int:
        return 0


class AnyLevelWillDo(Fault):
    def arguments(self, given: list[str]) -> list[str]:
        return [word for word in given if "-log-level" not in word]


# -- K ----------------------------------------------------------------------------------------


class InstallingIsHidden(Fault):
    def answer(self, call: Call, answer: Answer) -> Answer:
        text = answer.body.replace(b'"installing"', b'"installed"')
        return dataclasses.replace(answer, body=text)


class AnyInstallIsFine(Fault):
    def answer(self, call: Call, answer: Answer) -> Answer:
        is_install = call.path == "/api/components/install"
        return dataclasses.replace(answer, status=200) if is_install else answer


# -- R ----------------------------------------------------------------------------------------


class RecordsAreForgotten(Fault):
    def prepare(self, environment: dict[str, str]) -> None:
        for file in self.home.glob("runners/*/task.json"):
            file.unlink()


class ContainersEndWithTheShim(Fault):
    def prepare(self, environment: dict[str, str]) -> None:
        self._environment = dict(environment)

    def signalled(self) -> None:
        listed = self._docker("ps", "--quiet", "--filter", "label=ai.dstack.shim.is-task=true")
        self._docker("kill", *listed.split())

    def _docker(self, *words: str) -> str:
        done = subprocess.run(
            ["docker", *words],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        return done.stdout


class OutcomesComeLate(Fault):
    """For a second after the start, every task is still running."""

    def __init__(self) -> None:
        super().__init__()
        self._since = 0.0

    def answer(self, call: Call, answer: Answer) -> Answer:
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since > 1:
            return answer
        text = answer.body.replace(b'"terminated"', b'"running"')
        return dataclasses.replace(answer, body=text)


# -- H ----------------------------------------------------------------------------------------


class PlaceholderIsAVersion(Fault):
    def answer(self, call: Call, answer: Answer) -> Answer:
        if call.path != "/api/instance/info":
            return answer
        return answer.with_json({"gpu_driver_version": "N/A"} | answer.json)


class HostInfoIsRewritten(Fault):
    def prepare(self, environment: dict[str, str]) -> None:
        (self.home / "host_info.json").unlink(missing_ok=True)


class GpusAreShared(_CreateFault):
    """Two tasks get the same card."""

    def change(self, body: dict[str, Any]) -> None:
        for request in body["HostConfig"].get("DeviceRequests") or []:
            request["DeviceIDs"] = ["GPU-00000000-1111-2222-3333-444444444444"]


# -- V and Y ----------------------------------------------------------------------------------


class _ToolFault(Fault):
    """A tool of the host says something else."""

    name: ClassVar[str]
    script: ClassVar[str]

    def prepare(self, environment: dict[str, str]) -> None:
        folder = Path(tempfile.mkdtemp(prefix="t", dir="/run/lab"))
        file = folder / self.name
        file.write_text(f"#!/bin/sh\n{self.script}\n")
        file.chmod(0o755)
        environment["PATH"] = f"{folder}:{environment['PATH']}"


class VolumesStayMounted(_ToolFault):
    name, script = "umount", "exit 0"


class EverythingLooksBlank(_ToolFault):
    name, script = "blkid", "exit 2"


class ModeIsForgotten(Fault):
    """Whatever the host's file was, it is 0644 afterwards."""

    def answer(self, call: Call, answer: Answer) -> Answer:
        for file in _key_files():
            file.chmod(0o644)
        return answer


class KeysStay(Fault):
    """Lines of the shim come back when their task has ended."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[Path, set[str]] = {}
        self._lock = threading.Lock()

    def answer(self, call: Call, answer: Answer) -> Answer:
        with self._lock:
            for file in _key_files():
                lines = file.read_text(errors="replace").splitlines()
                marked = {line for line in lines if line.endswith(" # added by dstack-shim")}
                gone = self._seen.setdefault(file, set()) - marked
                with file.open("a") as opened:
                    opened.writelines(f"{line}\n" for line in gone)
                self._seen[file] |= marked
        return answer


def _key_files() -> list[Path]:
    with Path("/etc/passwd").open(encoding="utf-8") as file:
        homes = [line.split(":")[5] for line in file if line.startswith(("alice:", "bob:"))]
    return [path for home in homes if (path := Path(home, ".ssh", "authorized_keys")).is_file()]


def _info(answer: Answer) -> dict[str, Any] | None:
    """The task info in an answer, if it is one."""
    document = answer.json
    if isinstance(document, dict) and "termination_reason" in document:
        return document
    return None


def _values(document: Any) -> list[Any]:
    return list(document.values()) if isinstance(document, dict) else []


def _all_faults() -> dict[str, type[Fault]]:
    found = {"none": Fault}
    pending = [Fault]
    while pending:
        for kind in pending.pop().__subclasses__():
            pending.append(kind)
            if not kind.__name__.startswith("_"):
                found[kind.__name__] = kind
    return found


FAULTS = _all_faults()

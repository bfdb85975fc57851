"""Broken states made on purpose: each is named, with what to do, and mended only if it is ours."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from dstack_shim_contracts.api import HealthcheckResponse, TaskConfig, VolumeInfo
from dstack_shim_contracts.record import Intent, Step
from dstack_shim_contracts.upgrade import Attempt, Outcome, ShimFile, Unfit, UpgradeState

from dstack_shim import cli
from dstack_shim.console import doctor
from dstack_shim.console.doctor import facts as facts_module
from dstack_shim.console.doctor import fixes
from dstack_shim.console.doctor.bundle import log_line
from dstack_shim.console.doctor.checks import checks
from dstack_shim.console.doctor.facts import Disk, Facts, gather
from dstack_shim.console.doctor.findings import Check, Cure
from dstack_shim.console.sources import ShimSays
from dstack_shim.console.text import shown
from dstack_shim.doctor import Level
from dstack_shim.engine.protocol import EngineInfo, Mount
from dstack_shim.errors import EngineUnreachable
from dstack_shim.home import lock_home
from dstack_shim.host.gpus import GpuInventory
from dstack_shim.log import EventLog, event_log
from dstack_shim.resources.ssh_keys import parse_key
from dstack_shim.resources.volume_names import ROOT
from dstack_shim.settings import Settings
from dstack_shim.upgrade_state import UpgradeFile
from tests.lab.fake_engine import FakeEngine
from tests.lab.host import public_key
from tests.shim.host_in_memory import Host

Output = pytest.CaptureFixture[str]
Changes = dict[str, Any]
Run = Callable[..., tuple[int, str, str]]
OK, WARNING, BROKEN = Level.OK, Level.WARNING, Level.BROKEN
KEY = public_key(1)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    (tmp_path / "home").mkdir(mode=0o755)
    runner = tmp_path / "runner"
    runner.write_text("#!/bin/sh\n")
    runner.chmod(0o755)
    monkeypatch.setattr(facts_module, "_disks", lambda home, root: ())  # this machine's own
    monkeypatch.setattr(facts_module, "_users", lambda holders: [])  # and its users
    return Host(tmp_path / "home")


def look(host: Host, **changes: Any) -> Facts:
    settings = Settings(
        shim_home=str(host.home),
        shim_http_port=_free_port(),
        runner_binary_path=str(host.home.parent / "runner"),
    )
    found = asyncio.run(gather(settings, host.engine))
    return attrs.evolve(found, **changes)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def serving(facts: Facts, version: str = "") -> Facts:
    """The same with a shim that answers."""
    assert facts.sources is not None
    here = version or "0.22.5"
    says = ShimSays(HealthcheckResponse("dstack-shim", here), (), {})
    return attrs.evolve(facts, sources=attrs.evolve(facts.sources, shim=says))


def wrong(found: tuple[Check, ...]) -> dict[str, Check]:
    return {check.what: check for check in found if check.level is not OK}


def test_a_host_in_order_has_nothing_wrong(host: Host) -> None:
    host.record("t1", gpus=("g1",), intent=Intent(Step.RUNNING, 1.0))
    host.run("t1", gpus=("g1",))
    found = checks(serving(look(host, gpus=("g1",))))
    assert wrong(found) == {}
    assert {"home", "engine", "boot", "shim", "version", "runner"} <= {c.what for c in found}
    assert {"containers", "GPUs", "volumes", "keys"} <= {c.what for c in found}


State = Callable[[Host], Changes]


def _no_engine(host: Host) -> Changes:
    class Gone(FakeEngine):
        async def ping(self) -> EngineInfo:
            raise EngineUnreachable("no such socket")

        async def list_task_containers(self) -> tuple[()]:
            raise EngineUnreachable("no such socket")

    host.engine = Gone()
    return {}


def _old_engine(host: Host) -> Changes:
    class Old(FakeEngine):
        async def ping(self) -> EngineInfo:
            return EngineInfo("19.03", "1.40", "/nowhere")

    host.engine = Old()
    return {}


def _damaged(host: Host) -> Changes:
    host.record("t1").write_text("{")
    return {}


def _set_aside(host: Host) -> Changes:
    record = host.record("t1")
    record.rename(record.with_name(".task.json.damaged-1"))
    return {}


def _newer(host: Host) -> Changes:
    record = host.record("t1")
    record.write_text('{"version": 1, "min_reader": 99}')
    return {}


def _no_record(host: Host) -> Changes:
    (host.home / "runners" / "theirs").mkdir()
    return {}


def _of_another_home(host: Host) -> Changes:
    host.run("t1", home="/another")
    return {}


def _two_containers(host: Host) -> Changes:
    host.record("t1")
    host.run("t1")
    host.run("t1", other_name="second")
    return {}


def _ended_but_runs(host: Host) -> Changes:
    host.record("t1", termination_reason="x", cleaned_up=True)
    host.run("t1")
    return {}


def _shared_gpu(host: Host) -> Changes:
    for task_id in ("t1", "t2"):
        host.record(task_id, gpus=("g1",))
        host.run(task_id)
    return {"gpus": ("g1",)}


def _lost_gpu(host: Host) -> Changes:
    host.record("t1", gpus=("g1",))
    host.run("t1")
    return {}


def _volume_of_nobody(host: Host) -> Changes:
    return {"mounted": {"data": "/dev/sdb"}}


def _with_volume(host: Host) -> None:
    config = TaskConfig(id="t1", name="job", volumes=(VolumeInfo(name="data"),))
    host.record("t1", config=config)
    host.run("t1")


def _volume_missing(host: Host) -> Changes:
    _with_volume(host)
    return {}


def _key_of_nobody(host: Host) -> Changes:
    return {"keys": {"alice": (parse_key(KEY).fingerprint,)}}


def _key_missing(host: Host) -> Changes:
    config = TaskConfig(id="t1", name="job", host_ssh_user="alice", host_ssh_keys=(KEY,))
    host.record("t1", config=config)
    host.run("t1")
    return {}


def _disk(**fields: Any) -> State:
    shares = {"free": 1000, "free_share": 0.5, "free_files_share": 0.5, **fields}
    return lambda host: {"disks": (Disk("home", "/home", **shares),)}


def _open(path: str, mode: int) -> State:
    def arrange(host: Host) -> Changes:
        host.record("t1")
        for found in [host.home] if path == "." else host.home.glob(path):
            found.chmod(mode)
        return {}

    return arrange


def _leftover(host: Host) -> Changes:
    (host.home / "runners" / ".new-t1-1").mkdir()
    return {}


def _no_runner(host: Host) -> Changes:
    (host.home.parent / "runner").unlink()
    return {}


def _dead_runner(host: Host) -> Changes:
    (host.home.parent / "runner").chmod(0o644)
    return {}


def _rolled_back(host: Host) -> Changes:
    old, new = ShimFile("1"), ShimFile("2", "ab" * 32)
    attempt = Attempt(old, new, Outcome.ROLLED_BACK, "2026-01-02T03:04:05Z", reason="too slow")
    state = UpgradeState(attempt, (Unfit(new, "too slow"),))
    UpgradeFile(host.home, event_log()).write(state)
    return {}


def _large_log(host: Host) -> Changes:
    return {"log_size": 2 << 30}


STATES: dict[str, tuple[State, Level, str, str, Cure | None]] = {
    "the engine is stopped": (_no_engine, BROKEN, "engine", "systemctl start docker", None),
    "the engine is too old": (_old_engine, BROKEN, "engine version", "20.10 or newer", None),
    "a record is damaged": (_damaged, WARNING, "record in job-", "keep a copy", None),
    "one was before": (_set_aside, WARNING, "record job-", "see what it was", None),
    "a record is of a newer shim": (_newer, WARNING, "directory job-", "left alone", None),
    "a directory has no record": (_no_record, WARNING, "directory theirs", "left alone", None),
    "a container is another home's": (_of_another_home, WARNING, "container ", "left alone", None),
    "a task runs twice": (_two_containers, BROKEN, "container second", "stop one", Cure.STOP),
    "a task has ended and runs": (
        _ended_but_runs,
        BROKEN,
        "container job-",
        "stops it",
        Cure.STOP,
    ),
    "a GPU has two tasks": (_shared_gpu, WARNING, "GPU g1", "terminate one", None),
    "a GPU is gone": (_lost_gpu, BROKEN, "GPU g1", "reboot", None),
    "a volume is nobody's": (_volume_of_nobody, WARNING, "volume data", "unmount", Cure.UNMOUNT),
    "a volume is missing": (_volume_missing, BROKEN, "volume data", "do not detach", None),
    "a key is nobody's": (_key_of_nobody, WARNING, "keys of alice", "remove", Cure.FORGET_KEYS),
    "a key is missing": (_key_missing, WARNING, "keys of alice", "submit the job anew", None),
    "a disk is low": (_disk(free_share=0.05), WARNING, "disk of the home", "make room", None),
    "a disk is full": (_disk(free_share=0.01), BROKEN, "disk of the home", "make room", None),
    "no more files": (_disk(free_files_share=0.0), BROKEN, "disk of the home", "make room", None),
    "the home is open": (_open(".", 0o777), WARNING, "mode of /", "chmod", Cure.CLOSE),
    "so is a record": (_open("runners/*/task.json", 0o644), WARNING, "mode of /", "", Cure.CLOSE),
    "a crash left something": (_leftover, WARNING, "leftover .new-", "next start", Cure.SWEEP),
    "the runner is missing": (_no_runner, BROKEN, "runner", "let the server install it", None),
    "it cannot be executed": (_dead_runner, BROKEN, "runner", "--runner-binary-path", None),
    "an upgrade went back": (_rolled_back, WARNING, "upgrade", "dstack-shim events", None),
    "the log is large": (_large_log, WARNING, "log", "logrotate", None),
}


@pytest.mark.parametrize(("arrange", "level", "what", "todo", "cure"), STATES.values(), ids=STATES)
def test_a_broken_state_is_named_with_what_to_do(
    host: Host, arrange: State, level: Level, what: str, todo: str, cure: Cure | None
) -> None:
    changes = arrange(host)
    facts = serving(look(host, **changes))
    found = wrong(checks(facts))
    (name,) = [name for name in found if name.startswith(what) and found[name].level is level]
    assert todo in found[name].todo
    assert found[name].todo
    fix = found[name].fix
    assert (fix.cure if fix is not None else None) is cure


def test_a_shim_that_does_not_answer_is_broken_none_is_a_warning(host: Host) -> None:
    assert wrong(checks(look(host)))["shim"].level is WARNING
    lock = lock_home(host.home)
    check = wrong(checks(look(host)))["shim"]
    os.close(lock)
    assert check.level is BROKEN
    assert f"process {os.getpid()} holds the home" in check.words
    assert "kill -9" in check.todo


def test_a_port_that_is_taken_is_broken(host: Host) -> None:
    check = wrong(checks(look(host, is_port_taken=True)))["port"]
    assert check.level is BROKEN
    assert "ss -ltnp" in check.todo


def test_another_version_than_this_file_s_is_a_warning(host: Host) -> None:
    check = wrong(checks(serving(look(host), "0.1.2")))["version"]
    assert check.words.startswith("0.1.2 runs, this file is ")


def test_without_an_engine_nothing_is_called_nobodys(host: Host) -> None:
    host.record("t1", gpus=("g1",))
    changes = {**_no_engine(host), **_volume_of_nobody(host), **_key_of_nobody(host)}
    assert set(wrong(checks(serving(look(host, **changes))))) == {"engine"}


def test_beside_another_home_marks_are_nobodys_to_remove(host: Host) -> None:
    changes = {**_of_another_home(host), **_volume_of_nobody(host), **_key_of_nobody(host)}
    found = wrong(checks(look(host, **changes)))
    assert found["volume data"].fix is None
    assert found["keys of alice"].fix is None


@pytest.mark.parametrize(
    ("source", "is_nobodys"), [(f"{ROOT}/data", False), ("/elsewhere/data", True)]
)
def test_a_volume_that_a_container_uses_is_somebodys(
    host: Host, source: str, is_nobodys: bool
) -> None:
    host.run("t1", home="/another")
    facts = serving(look(host, **_volume_of_nobody(host)))
    assert facts.sources is not None
    assert facts.sources.containers is not None
    boxes = tuple(
        attrs.evolve(box, mounts=(Mount(source, "/data"),)) for box in facts.sources.containers
    )
    facts = attrs.evolve(facts, sources=attrs.evolve(facts.sources, containers=boxes))
    assert ("volume data" in wrong(checks(facts))) is is_nobodys


def test_what_dstacks_own_shim_made_is_not_ours_to_stop(host: Host) -> None:
    host.record("t1", termination_reason="x", cleaned_up=True)
    host.run("t1")
    facts = look(host)
    assert facts.sources is not None
    assert facts.sources.containers is not None
    stock = tuple(attrs.evolve(box, home=None) for box in facts.sources.containers)
    facts = attrs.evolve(facts, sources=attrs.evolve(facts.sources, containers=stock))
    assert [check for check in checks(facts) if check.fix] == []


# The command.


@pytest.fixture
def call(host: Host, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> Run:
    """``dstack-shim doctor`` with these words and answers, its engine the one in memory."""
    monkeypatch.setattr(doctor, "DockerEngine", lambda: host.engine)
    monkeypatch.setattr(fixes, "STOP_GRACE", 0)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    runner = host.home.parent / "runner"

    def run(*words: str, answers: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(answers))
        flags = [f"--shim-home={host.home}", f"--runner-binary-path={runner}"]
        code = cli.main(["doctor", *flags, f"--shim-http-port={_free_port()}", *words])
        answer = capsys.readouterr()
        return code, answer.out, answer.err

    return run


def test_it_tells_what_is_wrong_first_and_then_what_a_start_would_do(
    host: Host, call: Run
) -> None:
    host.record("t1", intent=Intent(Step.RUNNING, 1.0))
    host.run("t1")
    code, out, _ = call()
    lines = out.splitlines()
    assert code == 1
    assert lines[0] == "warning  shim: none runs on this home"
    assert lines[1].startswith("         start it: ")
    assert any(line.startswith("plan     restore task t1 as running") for line in lines)
    assert lines[-1].startswith("a start would keep 1 task(s)")


def test_it_exits_by_the_worst(host: Host, call: Run) -> None:
    assert call()[0] == 1
    (host.home.parent / "runner").unlink()
    assert call()[0] == 2
    assert cli.main(["doctor", "--shim-home=/nowhere"]) == 2
    assert cli.main(["doctor", "--no-such-flag"]) == 2
    assert call("--fix", "--json")[0] == 2


def test_for_programs_it_prints_one_json_object(host: Host, call: Run) -> None:
    host.record("t1")
    container_id = host.run("t1")
    _, out, _ = call("--json")
    printed = json.loads(out)
    assert printed["level"] == "warning"
    (finding,) = [item for item in printed["findings"] if item["level"] == "warning"]
    assert (finding["what"], finding["fix"]) == ("shim", None)
    assert [task["id"] for task in printed["tasks"]] == ["t1"]
    assert printed["tasks"][0]["container_id"] == container_id
    assert printed["plan"][0].startswith("restore task t1 as running")


def test_it_asks_before_it_mends_and_leaves_what_is_not_wanted(host: Host, call: Run) -> None:
    _ended_but_runs(host)
    (host.home / "runners" / ".new-t1-1").mkdir()
    host.home.chmod(0o777)
    asked = call("--fix", answers="n\nno\n\n")[1]
    assert asked.count("[y/N]") == 3
    assert "mended" not in asked
    assert host.home.stat().st_mode & 0o777 == 0o777
    done = call("--fix", answers="y\ny\nyes\n")[1]
    assert done.count(": mended") == 3
    assert host.home.stat().st_mode & 0o777 == 0o755
    assert not (host.home / "runners" / ".new-t1-1").exists()
    assert not any(box.state.alive for box in asyncio.run(host.engine.list_task_containers()))
    assert "nothing here can be mended" in call("--fix")[1]


def test_it_mends_nothing_beside_a_shim(host: Host, call: Run) -> None:
    host.home.chmod(0o777)
    lock = lock_home(host.home)
    code, _, err = call("--fix", answers="y\n" * 9)
    os.close(lock)
    assert code == 1
    assert "another shim" in err
    assert host.home.stat().st_mode & 0o777 == 0o777


def test_a_cure_that_fails_costs_the_others_nothing(
    host: Host, call: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ended_but_runs(host)
    host.home.chmod(0o777)

    async def refuse(*_: object) -> None:
        raise EngineUnreachable("it went away")

    monkeypatch.setattr(host.engine, "stop", refuse)
    out = call("--fix", answers="y\n" * 9)[1]
    assert "not mended: it went away" in out
    assert host.home.stat().st_mode & 0o777 == 0o755


def test_a_link_in_place_of_a_record_is_not_followed(
    host: Host, call: Run, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.write_text("")
    target.chmod(0o666)
    record = host.record("t1")
    record.unlink()
    record.symlink_to(target)
    call("--fix", answers="y\n" * 9)
    assert target.stat().st_mode & 0o777 == 0o666


SECRETS = ("S3CRET", KEY.split()[1])


def test_the_bundle_holds_what_helps_and_no_secret(host: Host, call: Run, tmp_path: Path) -> None:
    config = TaskConfig(
        id="t1",
        name="job",
        host_ssh_user="alice",
        host_ssh_keys=(KEY,),
        container_ssh_keys=(KEY,),
        image_name="image:1",
    )
    record = host.record("t1", config=config, termination_message="token=S3CRET")
    text = json.loads(record.read_text())
    text["env"] = {"WANDB": "S3CRET"}
    text["config"]["registry_password"] = "S3CRET"
    record.write_text(json.dumps(text))
    (host.home / "shim.log").write_text(
        "2026-01-02T03:04:05.678Z INFO task.ended task=t1 message=S3CRET\n"
        "2026-01-02T03:04:05.678Z INFO component.installed url=https://user:S3CRET@host/x\n"
        "time=2026 level=info msg=S3CRET\n"
    )
    bundle = tmp_path / "support.tar.gz"
    code, _, err = call("--bundle", str(bundle))
    assert code == 1
    assert "look through it" in err
    assert bundle.stat().st_mode & 0o777 == 0o600
    with tarfile.open(bundle) as archive:
        held = {
            member.name.removeprefix("dstack-shim-support/"): archive.extractfile(member).read()  # type: ignore[union-attr]  # all of them files
            for member in archive.getmembers()
        }
    assert {"doctor.json", "containers.json", "shim.log", "upgrade.json"} < set(held)
    everything = b"".join(held.values()).decode()
    assert not [secret for secret in SECRETS if secret in everything]
    (name,) = [name for name in held if name.startswith("records/")]
    assert json.loads(held[name])["config"]["image_name"] == "image:1"
    assert 'task="t1"' in held["shim.log"].decode()
    assert call("--bundle", str(bundle))[0] == 1  # it is there already


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("x token=1 password=2", None),
        (
            "2026-01-02T03:04:05.678Z INFO a api_key=abc registry_password=d count=3",
            (
                '2026-01-02T03:04:05.678Z INFO a api_key="3 characters left out" '
                'registry_password="1 characters left out" count="3"'
            ),
        ),
    ],
)
def test_a_line_of_the_log_for_the_bundle(line: str, kept: str | None) -> None:
    assert log_line(line) == kept


def test_a_tool_that_fails_is_told_with_what_to_do(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_run: object, log: EventLog) -> GpuInventory:
        log.warning("gpus.not_detected", vendor="nvidia", error="it hangs")
        return GpuInventory()

    monkeypatch.setattr(facts_module, "detect_gpus", fails)
    check = wrong(checks(serving(look(host))))["gpus.not_detected"]
    assert "it hangs" in check.words
    assert "by hand" in check.todo


def test_keys_are_looked_for_where_users_of_this_host_may_have_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for user in ("alice", "bob"):
        (tmp_path / user / ".ssh").mkdir(parents=True)
    (tmp_path / "alice" / ".ssh" / "authorized_keys").touch()
    passwd = tmp_path / "passwd"
    lines = [f"{user}:x:1:1::{tmp_path}/{user}:/bin/sh" for user in ("alice", "bob", "carol")]
    passwd.write_text("\n".join([*lines, "", "odd", ":::", "+@netgroup"]))
    monkeypatch.setattr(facts_module, "PASSWD", passwd)
    assert list(facts_module._with_keys()) == ["alice"]


def test_what_a_name_holds_reaches_no_terminal(host: Host, call: Run) -> None:
    (host.home / "runners" / "a\x1b[2J\u202e").mkdir()
    out = call()[1]
    assert r"directory a\x1b[2J\u202e" in out
    assert all(shown(line) == line for line in out.splitlines())
    assert call("--json")[1].isascii()

"""What the commands print of fixed records, where neither a shim nor an engine answers."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from dstack_shim_contracts.api import InstanceMount, TaskConfig, VolumeMount
from dstack_shim_contracts.record import TaskRecord

from dstack_shim import cli
from dstack_shim.console.text import shown
from tests.shim.console.conftest import NOW, Home

Output = pytest.CaptureFixture[str]


def test_ps_tells_what_the_records_say(home: Home, capsys: Output) -> None:
    home.record("t1", image="registry/base:1")
    home.ended("t2", "container_exited_with_error", "Traceback\n\x1b[31mboom")
    assert home.call("ps") == 0
    answer = capsys.readouterr()
    assert answer.out.splitlines() == [
        "TASK  NAME     STATUS      SINCE  IMAGE            GPUS  PORTS  OUTCOME",
        "t1    t1-name  running     1h     registry/base:1  -     host   -",
        (
            r"t2    t2-name  terminated  1m     image:1          1     -      "
            r"container_exited_with_error: Traceback | \x1b[31mboom"
        ),
    ]
    assert answer.err.splitlines() == [
        "dstack-shim: no shim answers on port 1",
        (
            "dstack-shim: no answer from the Docker Engine at unix://"
            f"{home.path.parent}/none.sock: No such file or directory"
        ),
        "dstack-shim: this is what the records alone say",
    ]


def test_ps_fits_80_columns(home: Home, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    first, second = "0c7f6c62-75fc-4d64-9fd6-6f1e7a4a38f2", "0c7f6c62-8000-4d64-9fd6-6f1e7a4a38f2"
    home.record(first, name="wonderful-duck-1-0-0", image="registry.example/dstackai/base:py3.11")
    home.ended(second, "container_exited_with_error", "out of memory " * 50)
    assert home.call("ps") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "TASK       NAME          STATUS     SINCE IMAGE         GPUS PORTS OUTCOME",
        "0c7f6c62-7 wonder…-1-0-0 running    1h    …/base:py3.11 -    host  -",
        "0c7f6c62-8 0c7f6c…2-name terminated 1m    image:1       1    -     container_ex…",
    ]
    assert max(map(len, lines)) <= 80


def test_ps_without_utf8_is_ascii(
    home: Home, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("COLUMNS", "80")
    home.ended("t1", "é" * 100, "日本")
    assert home.call("ps") == 0
    assert capsys.readouterr().out.isascii()


def test_ps_quietly_prints_ids(home: Home, capsys: Output) -> None:
    home.record("t1")
    home.ended("t2")
    assert home.call("ps", "--quiet") == 0
    assert capsys.readouterr() == ("t1\nt2\n", "")


def test_ps_for_programs(home: Home, capsys: Output) -> None:
    home.ended("t1", "done_by_runner")
    assert home.call("ps", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["shim"], answer["engine"]) == (False, False)
    assert answer["tasks"] == [
        {
            "id": "t1",
            "name": "t1-name",
            "status": "terminated",
            "since": "2023-11-14T22:12:20Z",
            "image": "image:1",
            "gpus": ["GPU-1"],
            "network_mode": "host",
            "ports": None,
            "termination_reason": "done_by_runner",
            "termination_message": None,
            "hint": None,
            "pull": None,
        }
    ]


def test_a_damaged_record_costs_its_neighbour_nothing(home: Home, capsys: Output) -> None:
    home.record("t1")
    (home.record("t2") / "task.json").write_text("{")
    assert home.call("ps", "-q") == 0
    assert capsys.readouterr().out == "t1\n"


def test_a_home_without_a_shim_has_no_tasks(home: Home, capsys: Output) -> None:
    (home.path / "runners").rmdir()
    assert home.call("ps") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("command", ["ps", "status", "show", "logs", "events"])
def test_a_home_that_is_none_is_an_error(command: str, tmp_path: Path, capsys: Output) -> None:
    words = [command, *(["t1"] if command in ("show", "logs") else [])]
    assert cli.main([*words, f"--shim-home={tmp_path}/none"]) == 1
    answer = capsys.readouterr()
    assert answer.out == ""
    assert f"{tmp_path}/none" in answer.err
    assert "--shim-home" in answer.err


@pytest.mark.parametrize("command", ["show", "logs"])
@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("nobody", "no task has the id or name 'nobody'"),
        ("", "no task has the id or name ''"),
        ("t", "'t' fits 2 tasks: t1, t2"),
        ("\x1b[2J", r"no task has the id or name '\x1b[2J'"),
    ],
)
def test_an_id_that_fits_no_task_or_more_than_one(
    home: Home, capsys: Output, command: str, word: str, why: str
) -> None:
    home.record("t1")
    home.record("t2")
    assert home.call(command, "--", word) == 4
    answer = capsys.readouterr()
    assert answer.out == ""
    assert why in answer.err


@pytest.mark.parametrize("word", ["t1", "t1-name", "t1-n"])
def test_show_tells_everything_of_one_task(home: Home, capsys: Output, word: str) -> None:
    directory = home.record(
        "t1-n",
        name="t1-name" if word == "t1-name" else "",
        config=TaskConfig(
            id="t1-n",
            name="t1-name",
            image_name="image:1",
            cpu=1.5,
            memory=4 << 30,
            host_ssh_user="ubuntu",
            host_ssh_keys=("ssh-ed25519 SECRET",),
            container_ssh_keys=("ssh-ed25519 SECRET",),
            volume_mounts=(VolumeMount("vol", "/data"),),
            instance_mounts=(InstanceMount("/mnt/here", "/there"),),
        ),
        gpus=("GPU-1", "GPU-2"),
        written_by="somebody 1",
    )
    assert home.call("show", word) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "task        t1-n",
        "name        t1-name",
        "status      running",
        "since       2023-11-14T21:13:20Z (1h ago)",
        "image       image:1",
        "user        root",
        "network     host",
        "limits      1.5 CPUs, 4.3 GB memory",
        "volume      vol at /data",
        "mount       /mnt/here at /there",
        "host keys   1 of ubuntu",
        "GPUs        GPU-1, GPU-2",
        "container   not known: the engine does not answer",
        "released    no",
        f"directory   {directory}",
        "written by  somebody 1",
    ]
    assert home.call("show", word, "--json") == 0
    both = out + capsys.readouterr().out
    assert "SECRET" not in both


def test_logs_without_an_engine_are_the_last_words(home: Home, capsys: Output) -> None:
    home.ended("t1", "container_exited_with_error", "first\n\x1b[31mlast\x1b[0m \x1b]0;x\x07")
    assert home.call("logs", "t1") == 1
    answer = capsys.readouterr()
    assert answer.out == "first\n" + r"last \x1b]0;x\x07" + "\n"
    assert "the output is with the engine, which does not answer" in answer.err


@pytest.mark.parametrize("lines", ["-1", "many", "1" * 12, "", "٣"])
@pytest.mark.parametrize("command", [["logs", "t1"], ["events"]])
def test_a_number_of_lines_that_is_none(
    home: Home, capsys: Output, command: list[str], lines: str
) -> None:
    assert home.call(*command, f"--lines={lines}") == 2
    assert "--lines" in capsys.readouterr().err


def test_status_without_a_shim(home: Home, capsys: Output) -> None:
    home.record("t1")
    home.ended("t2")
    assert home.call("status") == 3
    assert capsys.readouterr().out.splitlines() == [
        "shim    no answer",
        f"home    {home.path}",
        "engine  no answer",
        "tasks   1 running, 1 terminated",
    ]
    assert home.call("status", "--json") == 3
    answer = json.loads(capsys.readouterr().out)
    assert answer["shim"] is None
    assert answer["tasks"] == {"running": 1, "terminated": 1}


LOG = """\
2023-11-14T22:00:00.000Z INFO daemon.starting version=0.22.5 pid=7
2023-11-14T22:00:01.000Z INFO task.submitted task=t1 image=image:1
2023-11-14T22:00:02.000Z INFO task.submitted task=t10 image=image:1
time="2023" level=info msg="of dstack's own shim, about t1"
2023-11-14T22:00:03.000Z WARNING start.failed task=t1 message="no \\u001b[31m such\\n image"
"""


def test_events_in_order(home: Home, capsys: Output) -> None:
    (home.path / "shim.log").write_text(LOG)
    assert home.call("events", "-n", "4") == 0
    assert capsys.readouterr().out.splitlines() == [
        "2023-11-14T22:00:01.000Z  info   t1        task.submitted    image=image:1",
        "2023-11-14T22:00:02.000Z  info   t10       task.submitted    image=image:1",
        'time="2023" level=info msg="of dstack\'s own shim, about t1"',
        (
            "2023-11-14T22:00:03.000Z  warn   t1        start.failed      "
            r"message=no \x1b[31m such\n image"
        ),
    ]


def test_events_of_one_task(home: Home, capsys: Output) -> None:
    (home.path / "shim.log").write_text(LOG)
    assert home.call("events", "t1", "--json") == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["event"] for answer in answers] == ["task.submitted", "start.failed"]
    assert answers[1]["fields"]["message"] == "no \x1b[31m such\n image"
    assert home.call("events", "t10") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    ("word", "why"), [("t", "fits 2 tasks: t1, t10"), ("x", "is in no event")]
)
def test_events_of_nobody(home: Home, capsys: Output, word: str, why: str) -> None:
    (home.path / "shim.log").write_text(LOG)
    assert home.call("events", word) == 4
    assert why in capsys.readouterr().err


def test_events_at_80_columns(home: Home, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (home.path / "shim.log").write_text(LOG.replace("image:1", "x" * 1000))
    assert home.call("events") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "11-14 22:00:01  info   t1        task.submitted    image=" + "x" * 22 + "…"
    assert max(map(len, lines)) == 80


def test_what_is_told_is_fit_for_a_terminal_whatever_the_record_holds(
    home: Home, capsys: Output
) -> None:
    evil = "\x1b[2J\x9b\u202e\r\n" + "x" * 5000
    config = {
        field.name: evil
        for field in attrs.fields(TaskConfig)
        if str(field.type) == "str" and field.name not in ("id", "network_mode")
    }
    home.store.create("t1-x", _evil_record(config, evil))
    for words in (["ps"], ["show", "t1"], ["status"], ["logs", "t1"]):
        home.call(*words)
        answer = capsys.readouterr()
        for line in (answer.out + answer.err).splitlines():
            assert shown(line) == line


def _evil_record(config: dict[str, str], evil: str) -> TaskRecord:
    return TaskRecord(
        "t1",
        TaskConfig(id="t1", **config),  # type: ignore[arg-type]  # all of them texts
        termination_reason=evil,
        termination_message=evil,
        gpus=(evil,),
        written_by=evil,
        ended_at=NOW,
    )

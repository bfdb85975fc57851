"""The contracts against dstack's own releases: their models read our answers, we read theirs."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import attrs
import jsonschema
import pytest
from dstack_shim_contracts import golden, schemas
from dstack_shim_contracts.api import (
    ComponentInstallRequest,
    ShutdownRequest,
    TaskConfig,
    TerminateRequest,
)
from dstack_shim_contracts.codec import decode, validate_submit

from tests.releases import environments
from tests.releases.running import run_inside

# What servers read; the other shapes are requests, or never leave the host.
ANSWERS = (
    "healthcheck",
    "instance-health",
    "instance-info",
    "components",
    "task-list",
    "task-info",
)

version = pytest.mark.parametrize("version", environments.CONTRACT)


@cache
def readings(release: str) -> Any:
    """Every good answer, as a release's own models read it."""
    bodies = {
        shape: {e.name: base64.b64encode(e.raw).decode() for e in golden.good(shape)}
        for shape in ANSWERS
    }
    return run_inside(environments.pristine(release), "read_answers.py", stdin=bodies)


@cache
def requests(release: str) -> tuple[dict[str, Any], ...]:
    """Every request a release's own client can send."""
    return tuple(run_inside(environments.pristine(release), "send_requests.py"))


def bodies(release: str, path: str) -> Iterator[bytes]:
    found = [r["body"] for r in requests(release) if r["method"] == "POST" and r["path"] == path]
    assert found
    return (body.encode() for body in found)


# Their models, our answers -----------------------------------------------------------------------


@version
@pytest.mark.parametrize("shape", ANSWERS)
def test_every_good_answer_is_read(version: str, shape: str) -> None:
    if shape == "instance-info" and version == "0.20.29":
        assert shape not in readings(version)  # the route came with 0.21.0
        return
    refused = {n: r["refused"] for n, r in readings(version)[shape].items() if "refused" in r}
    assert not refused
    assert readings(version)[shape]


@version
def test_what_is_read_is_what_was_said(version: str) -> None:
    for shape, by_name in readings(version).items():
        for example in golden.good(shape):
            said = json.loads(example.raw)
            differing = differences(by_name[example.name]["read"], said)
            assert not differing, f"{example}: {differing}"


def differences(read: Any, said: Any) -> list[tuple[Any, Any]]:
    """Where a model holds something else than the document; keys only one of them has don't count.

    They are those the release does not know, and its defaults for those left out.
    """
    if isinstance(read, dict) and isinstance(said, dict):
        return [d for key in read.keys() & said.keys() for d in differences(read[key], said[key])]
    if isinstance(read, list) and isinstance(said, list) and len(read) == len(said):
        return [d for r, s in zip(read, said, strict=True) for d in differences(r, s)]
    return [] if read == said else [(read, said)]


# Their requests, our readers ---------------------------------------------------------------------


@version
def test_every_submitted_task_is_understood(version: str) -> None:
    least, most, without_gpu, limited = [
        decode(TaskConfig, body) for body in bodies(version, "/api/tasks")
    ]
    for config in (least, most, without_gpu, limited):
        validate_submit(config)
    assert (least.gpu, least.cpu, least.memory, least.network_mode) == (-1, 0, 0, "host")
    assert (most.gpu, most.cpu, most.network_mode) == (2, 1.5, "bridge")
    assert (most.memory, most.shm_size) == (int(8.5 * 2**30), 2**28)
    assert [(v.backend, v.init_fs, v.device_name) for v in most.volumes] == [
        ("aws", True, "/dev/sdf"),
        ("gcp", False, None),
        ("aws", False, None),
    ]
    assert most.registry_password == 'p"a\\ss\u00e9\n'
    assert most.instance_mounts[0].instance_path == "/mnt/a"
    assert most.gpu_devices[0].path_on_host == "/dev/nvidia0"
    assert most.container_ssh_keys == ("ssh-ed25519 AAAA one", "ssh-rsa BBBB two")
    assert without_gpu.gpu == 0


@version
def test_every_key_of_a_submitted_task_is_one_we_know_and_the_other_way_round(
    version: str,
) -> None:
    known = {field.name for field in attrs.fields(TaskConfig)}
    for body in bodies(version, "/api/tasks"):
        assert set(json.loads(body)) == known


@version
def test_termination_is_understood(version: str) -> None:
    dangling, by_user = [
        decode(TerminateRequest, body) for body in bodies(version, "/api/tasks/t/terminate")
    ]
    assert dangling == TerminateRequest("", "", 0)
    assert by_user == TerminateRequest("terminated_by_user", "by \u00fcser", 10)


@version
def test_shutdown_is_understood(version: str) -> None:
    sent = [decode(ShutdownRequest, body) for body in bodies(version, "/api/shutdown")]
    assert sent == [ShutdownRequest(force=False), ShutdownRequest(force=True)]


@version
def test_component_installs_are_understood(version: str) -> None:
    sent = [
        decode(ComponentInstallRequest, body)
        for body in bodies(version, "/api/components/install")
    ]
    assert [(r.name, r.url, r.sha256) for r in sent] == [
        ("dstack-runner", "https://example.test/runner", ""),
        ("dstack-shim", "https://example.test/shim", ""),
    ]


@version
@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/api/tasks", "task-submit"),
        ("/api/tasks/t/terminate", "task-terminate"),
        ("/api/shutdown", "shutdown"),
        ("/api/components/install", "component-install"),
    ],
)
def test_every_body_fits_its_schema(version: str, path: str, shape: str) -> None:
    validator = jsonschema.Draft202012Validator(schemas.load(shape))
    for body in bodies(version, path):
        validator.validate(json.loads(body))


@version
def test_bodies_come_as_json_and_remove_comes_without_one(version: str) -> None:
    for request in requests(version):
        if request["method"] == "GET" or request["path"].endswith("/remove"):
            assert request["body"] is None
        else:
            assert request["type"] == "application/json"


@version
def test_no_path_is_called_that_the_protocol_does_not_have(version: str) -> None:
    called = {(request["method"], request["path"]) for request in requests(version)}
    assert called <= {
        ("GET", "/api/healthcheck"),
        ("POST", "/api/shutdown"),
        ("GET", "/api/instance/health"),
        ("GET", "/api/instance/info"),
        ("GET", "/api/components"),
        ("POST", "/api/components/install"),
        ("GET", "/api/tasks"),
        ("POST", "/api/tasks"),
        ("GET", "/api/tasks/t"),
        ("POST", "/api/tasks/t/terminate"),
        ("POST", "/api/tasks/t/remove"),
        ("GET", "/metrics/tasks/t"),
    }

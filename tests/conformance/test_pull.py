"""P: pulling images, from a stream a case writes, and from a real registry with a password."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import docker
import pytest

from tests.conformance.conftest import MakeShim, SilentPull
from tests.conformance.deadlines import Deadlines
from tests.conformance.engine import Reply, Request, Wire, refusal
from tests.conformance.images import Images
from tests.conformance.instance import Instance
from tests.conformance.pulls import SUCCESS, Stream, layer, line, scripted
from tests.conformance.registry import Registry
from tests.conformance.rows import row
from tests.conformance.secrets import NO_LOGIN, ODD, REGISTRY, WRONG, has_secret
from tests.conformance.shim import Shim, Task
from tests.eventually import eventually

PULLED = "conformance/pulled:latest"  # a tag that is always pulled


@pytest.fixture(scope="module")
def registry(instance: Instance, engine: docker.DockerClient) -> Iterator[Registry]:
    made = Registry(instance.root / "registry", engine)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def image_is_here(engine: docker.DockerClient, images: Images) -> None:
    """A scripted pull only says that the image came: it is there from the start."""
    engine.images.get(images.idle).tag(*PULLED.split(":"))


@pytest.fixture
def stream(wire: Wire) -> Iterator[Stream]:
    with scripted(wire) as made:
        yield made


def pulling(shim: Shim, **fields: Any) -> Task:
    return shim.submit(PULLED, **fields).reach("pulling")


def progress(task: Task, **expected: int | bool) -> None:
    """Wait until the progress says this, among other things."""

    def says_so() -> bool:
        found = task.info()["image_pull_progress"] or {}
        assert {key: found.get(key) for key in expected} == expected
        return True

    eventually(says_so, within=5)


# -- which reference, and whether -------------------------------------------------------------


@row("P1", "P2")
@pytest.mark.parametrize(
    ("image", "name", "tag"),
    [
        ("bare", "bare", "latest"),
        ("localhost/a", "localhost/a", "latest"),
        ("host:5000/a", "host:5000/a", "latest"),
        ("host:5000/a:1", "host:5000/a", "1"),
        ("a@sha256:{digest}", "a", "sha256:{digest}"),
        ("host:5000/a:1@sha256:{digest}", "host:5000/a", "sha256:{digest}"),
    ],
)
def test_reference_is_read_as_the_engine_reads_it(
    image: str, name: str, tag: str, shim: Shim, wire: Wire
) -> None:
    digest = "0" * 63 + "1"
    asked: list[Request] = []

    def refuse(request: Request) -> Reply:
        asked.append(request)
        return refusal(404, "no such thing")

    with wire.rule("POST", "^/images/create", refuse):
        shim.submit(image.format(digest=digest)).end()
    (request,) = asked
    assert request.wants == f"{name}:{tag}".format(digest=digest).replace(":sha256:", "@sha256:")


@row("P3")
def test_local_image_is_not_pulled(shim: Shim, images: Images, wire: Wire) -> None:
    wire.forget()
    task = shim.run(images.idle)
    assert wire.seen("POST", "^/images/create") == []
    assert task.info()["image_pull_progress"] is None


@row("P1", "P3")
def test_local_image_of_a_registry_with_a_port_is_not_pulled(
    shim: Shim, images: Images, wire: Wire, engine: docker.DockerClient
) -> None:
    engine.images.get(images.idle).tag("host.example:5000/team/local", "1")
    wire.forget()
    shim.run("host.example:5000/team/local:1")
    assert wire.seen("POST", "^/images/create") == []


@row("P4", "P2")
@pytest.mark.parametrize("image", ["conformance/pulled:latest", "conformance/pulled"])
def test_latest_is_pulled_each_time(image: str, shim: Shim, wire: Wire) -> None:
    for name in ("first", "second"):
        with scripted(wire) as stream:
            task = shim.submit(image, name=name)
            stream.succeed()
            task.reach("running")
            assert [request.wants for request in stream.asked] == [PULLED]


@row("P4")
def test_local_latest_does_not_stand_in_for_a_failed_pull(shim: Shim, wire: Wire) -> None:
    with wire.rule("POST", "^/images/create", lambda _: refusal(500, "the registry is down")):
        reason, message = shim.submit(PULLED).outcome()
    assert reason == "creating_container_error"
    assert "the registry is down" in message


# -- credentials ------------------------------------------------------------------------------


@row("P5")
def test_credentials_go_into_the_header(shim: Shim, stream: Stream) -> None:
    task = pulling(shim, **ODD.fields)
    request = eventually(lambda: stream.asked, within=5)[0]
    sent = request.headers["x-registry-auth"]
    found = json.loads(base64.urlsafe_b64decode(sent + "=" * (-len(sent) % 4)))
    assert (found["username"], found["password"]) == (ODD.username, ODD.password)
    stream.succeed()
    task.reach("running")


@row("P5")
def test_no_credentials_no_header(shim: Shim, stream: Stream) -> None:
    pulling(shim, **NO_LOGIN)
    request = eventually(lambda: stream.asked, within=5)[0]
    sent = request.headers.get("x-registry-auth", "")
    assert sent in {"", base64.urlsafe_b64encode(b"{}").decode(), "null"}


@row("P5", "P8", "P23")
def test_password_opens_a_real_registry(
    shim: Shim, images: Images, registry: Registry, engine: docker.DockerClient
) -> None:
    reference = registry.push(images.idle, "private/job:1")
    task = shim.submit(reference, **REGISTRY.fields)
    task.reach("running")
    assert engine.images.get(reference).id
    engine.images.remove(reference, force=True)


@row("P10", "P24")
@pytest.mark.parametrize(
    ("fields", "image", "words"),
    [
        pytest.param(
            NO_LOGIN, "private/job:1", ("no basic auth", "unauthorized"), id="no-password"
        ),
        pytest.param(
            WRONG.fields,
            "private/job:1",
            ("unauthorized", "authentication"),
            id="wrong-password",
        ),
        pytest.param(
            REGISTRY.fields,
            "private/job:none-such",
            ("manifest unknown", "not found"),
            id="no-such-tag",
        ),
    ],
)
def test_refused_pull_says_what_the_registry_said(
    fields: dict[str, str],
    image: str,
    words: tuple[str, ...],
    shim: Shim,
    images: Images,
    registry: Registry,
) -> None:
    registry.push(images.idle, "private/job:1")
    reason, message = shim.submit(f"{registry.host}/{image}", **fields).outcome()
    assert reason == "creating_container_error"
    assert any(word in message for word in words), message
    assert not has_secret(message.encode())


@row("P10", "P24")
def test_registry_that_is_not_there_says_so(shim: Shim) -> None:
    reason, message = shim.submit("127.0.0.1:1/none:1").outcome()
    assert reason == "creating_container_error"
    assert "connection refused" in message.lower()


# -- success and failure ----------------------------------------------------------------------


@row("P8")
def test_stream_without_a_final_status_is_a_failure(shim: Shim, stream: Stream) -> None:
    task = pulling(shim)
    stream.say(layer("base", "Pull complete"))
    stream.end()
    assert task.outcome()[0] == "creating_container_error"


@row("P8")
def test_connection_that_breaks_is_a_failure(shim: Shim, wire: Wire) -> None:
    def cut(send: Any) -> None:
        send(line(layer("base", "Downloading", current=1, total=2)))

    with wire.rule("POST", "^/images/create", lambda _: Reply(script=cut, cut=True)):
        assert shim.submit(PULLED).outcome()[0] == "creating_container_error"


@row("P9", "P24")
@pytest.mark.parametrize(
    "text",
    [
        "failed to register layer: write /blob: no space left on device",
        "toomanyrequests: You have reached your pull rate limit",
        "unexpected EOF ü 'quoted'",
    ],
)
def test_error_in_the_stream_reaches_the_user(text: str, shim: Shim, stream: Stream) -> None:
    task = pulling(shim)
    stream.say(layer("base", "Downloading", current=1, total=2))
    stream.say({"errorDetail": {"message": text}, "error": text})
    stream.end()
    reason, message = task.outcome()
    assert reason == "creating_container_error"
    assert text in message.replace("\\", "")


@row("P22", "P20")
def test_odd_messages_do_not_fail_a_pull(shim: Shim, stream: Stream) -> None:
    task = pulling(shim)
    stream.say(
        "not json at all",
        "null",
        "[]",
        '{"status": 5}',
        '{"status":"Downloading","id":7,"progressDetail":"much"}',
        {"id": "a", "status": "Downloading"},
        layer("b", "Downloading", current=-5, total="many"),
        layer("c", "Extracting", current=3, units="s"),
        layer("d", "Nobody knows this status", current=1),
        "",
    )
    stream.succeed()
    task.reach("running")


@row("P22")
def test_very_long_message_does_not_fail_a_pull(shim: Shim, stream: Stream) -> None:
    task = pulling(shim)
    stream.say({"id": "a", "status": "x" * 60_000})
    stream.succeed()
    task.reach("running")


# -- progress ---------------------------------------------------------------------------------


@row("P11", "P14", "P19")
def test_progress_moves_while_the_pull_goes_on(shim: Shim, stream: Stream) -> None:
    task = pulling(shim)
    eventually(lambda: stream.asked, within=5)
    assert task.info()["image_pull_progress"] is None
    stream.say({"id": "latest", "status": "Pulling from conformance/pulled"})
    stream.say(layer("one", "Pulling fs layer"), layer("two", "Pulling fs layer"))
    progress(task, downloaded_bytes=0, total_bytes=0, is_total_bytes_final=False)
    stream.say(layer("one", "Downloading", current=10, total=100))
    progress(task, downloaded_bytes=10, total_bytes=100, is_total_bytes_final=False)
    stream.say(layer("two", "Downloading", current=5, total=50))
    progress(task, downloaded_bytes=15, total_bytes=150, is_total_bytes_final=True)
    stream.say(layer("one", "Downloading", current=60, total=100))
    progress(task, downloaded_bytes=65, extracted_bytes=0, total_bytes=150)


@row("P15", "P16", "P17", "P12")
def test_progress_follows_a_layer_to_its_end(shim: Shim, stream: Stream) -> None:
    task = pulling(shim)
    stream.say(layer("one", "Downloading", current=10, total=100))
    stream.say(layer("one", "Verifying Checksum"), layer("one", "Download complete"))
    progress(task, downloaded_bytes=100, extracted_bytes=0, total_bytes=100)
    stream.say(layer("one", "Extracting", current=40, total=100))
    progress(task, downloaded_bytes=100, extracted_bytes=40, total_bytes=100)
    stream.say(layer("one", "Pull complete"))
    progress(task, downloaded_bytes=100, extracted_bytes=100, is_total_bytes_final=True)
    stream.succeed()
    task.reach("running")
    progress(task, downloaded_bytes=100, extracted_bytes=100, total_bytes=100)


@row("P17", "P14", "P19")
def test_layer_may_leave_out_messages(shim: Shim, stream: Stream) -> None:
    """Engines merge and drop messages when their client is slow."""
    task = pulling(shim)
    stream.say(layer("unannounced", "Downloading", current=10, total=100))
    stream.say(layer("sudden", "Pull complete"), layer("begun", "Pulling fs layer"))
    progress(task, downloaded_bytes=10, total_bytes=100, is_total_bytes_final=False)
    stream.say(layer("unannounced", "Extracting", current=100, total=100))
    stream.say(layer("begun", "Pull complete"))
    progress(task, downloaded_bytes=100, extracted_bytes=100, is_total_bytes_final=True)
    stream.succeed()
    task.reach("running")


@row("P19", "P20")
def test_layer_without_total_is_not_final_until_it_is_there(shim: Shim, stream: Stream) -> None:
    task = pulling(shim)
    stream.say(layer("known", "Downloading", current=10, total=100))
    stream.say(layer("other", "Downloading", current=7))
    progress(task, total_bytes=100, is_total_bytes_final=False)
    stream.say(layer("other", "Download complete"), layer("other", "Extracting"))
    stream.say(layer("known", "Download complete"))
    progress(task, total_bytes=100, is_total_bytes_final=False)
    stream.say(layer("other", "Pull complete"))
    progress(task, total_bytes=100, is_total_bytes_final=True)
    stream.succeed()
    task.reach("running")


@row("P18", "P19")
def test_layers_that_are_there_count_as_final(shim: Shim, stream: Stream) -> None:
    task = pulling(shim)
    stream.say(layer("old", "Already exists"), layer("new", "Waiting"))
    progress(task, total_bytes=0, is_total_bytes_final=False)
    stream.say(layer("new", "Downloading", current=1, total=10))
    progress(task, downloaded_bytes=1, total_bytes=10, is_total_bytes_final=True)


@row("P18")
def test_lines_without_a_layer_do_not_count(shim: Shim, stream: Stream) -> None:
    task = pulling(shim)
    stream.say({"status": "Downloading", "progressDetail": {"current": 5, "total": 10}})
    stream.say({"id": "latest", "status": "Pulling from x"}, {"status": "Digest: sha256:0"})
    stream.say(layer("one", "Downloading", current=1, total=2))
    progress(task, downloaded_bytes=1, total_bytes=2, is_total_bytes_final=True)


@row("P20", "P16")
@pytest.mark.parametrize("detail", [{"current": 9, "units": "s"}, {}, {"current": 9}])
def test_other_units_never_count_as_bytes(
    detail: dict[str, Any], shim: Shim, stream: Stream
) -> None:
    task = pulling(shim)
    stream.say(layer("one", "Downloading", current=100, total=100))
    stream.say(layer("one", "Download complete"))
    progress(task, downloaded_bytes=100, total_bytes=100)
    stream.say(layer("one", "Extracting", **detail), layer("mark", "Waiting"))
    progress(task, is_total_bytes_final=False)
    found = task.info()["image_pull_progress"]
    if "units" in detail:
        assert (found["downloaded_bytes"], found["total_bytes"]) == (100, 100)
        assert found["extracted_bytes"] == 0
    stream.say(layer("one", "Pull complete"), layer("mark", "Already exists"))
    progress(task, is_total_bytes_final=True)


@row("P21")
def test_sums_never_fall(shim: Shim, stream: Stream) -> None:
    task = pulling(shim)
    keys = ("downloaded_bytes", "extracted_bytes", "total_bytes")
    stream.say(layer("one", "Downloading", current=50, total=100))
    progress(task, downloaded_bytes=50, total_bytes=100)
    for number, message in enumerate(
        (
            layer("one", "Downloading", current=10, total=100),  # a download that began again
            layer("one", "Downloading", current=60),
            layer("one", "Extracting", current=20, total=30),
            layer("one", "Extracting", current=5, total=30),
        )
    ):
        before = task.info()["image_pull_progress"]
        mark = layer(f"mark{number}", "Downloading", current=1, total=1)
        stream.say(message, mark)
        eventually(
            lambda: task.info()["image_pull_progress"]["total_bytes"] > before["total_bytes"],  # noqa: B023 - asked at once
            within=5,
        )
        after = task.info()["image_pull_progress"]
        assert all(after[key] >= before[key] for key in keys)


@row("P13")
def test_progress_is_null_after_a_restart(new_shim: MakeShim, wire: Wire) -> None:
    shim = new_shim()
    with scripted(wire) as stream:
        task = pulling(shim)
        stream.say(layer("one", "Downloading", current=1, total=2))
        progress(task, downloaded_bytes=1)
        stream.succeed()
        task.reach("running")
    shim.restart()
    assert task.info()["image_pull_progress"] is None


@row("P11", "P19")
def test_progress_of_a_real_pull_adds_up(
    shim: Shim, images: Images, registry: Registry, engine: docker.DockerClient
) -> None:
    local = images.sized("conformance/sized:1", 3_000_000)
    reference = registry.push(local, "private/sized:1")
    engine.images.remove(local, force=True)
    task = shim.submit(reference, **REGISTRY.fields)
    task.reach("running", within=20)
    found = task.info()["image_pull_progress"]
    assert found["is_total_bytes_final"] is True
    assert found["total_bytes"] >= 3_000_000
    assert found["downloaded_bytes"] == found["extracted_bytes"] == found["total_bytes"]
    engine.images.remove(reference, force=True)


@row("P23")
def test_stream_is_kept_as_it_came(shim: Shim, stream: Stream) -> None:
    task = pulling(shim)
    first = layer("one", "Downloading", current=1, total=2)
    messages: list[dict[str, Any] | str] = [first, "not json", dict(SUCCESS)]
    stream.say(*messages)
    stream.end()
    task.reach("running")
    kept = (task.dir / "pull.log").read_bytes()
    assert kept.split() == b"".join(line(message) for message in messages).split()


@row("P7")
@pytest.mark.last(1)
def test_silence_of_a_minute_is_normal(silent_pull: SilentPull) -> None:
    silent_pull.wait_out()
    assert silent_pull.task.status == "pulling"
    silent_pull.stream.succeed()
    silent_pull.task.reach("running")


@row("P6")
@pytest.mark.full
@pytest.mark.last(4)
@pytest.mark.timeout(1300)
def test_pull_ends_after_twenty_minutes(deadlines: Deadlines) -> None:
    seconds = deadlines.pull.wait(within=1230)
    assert 1190 <= seconds <= 1230
    reason, message = deadlines.task.outcome()
    assert reason == "creating_container_error"
    assert message


@row("A60")
def test_a_pulling_task_is_in_the_way_of_a_guarded_shutdown(shim: Shim, stream: Stream) -> None:
    assert "guarded-shutdown" in shim.get("/api/healthcheck").json()["features"]
    task = pulling(shim)
    answer = shim.post("/api/shutdown", {"only_if_safe": True})
    assert answer.status_code == 409
    assert answer.headers["content-type"].startswith("application/json")
    (found,) = answer.json()["in_the_way"]
    assert (found["kind"], found["id"], found["status"]) == ("task", task.id, "pulling")
    assert found["why"]
    assert shim.alive
    assert task.info()["status"] == "pulling"

"""The suite's own watch over credentials finds them wherever it says it looks."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.engine import Request
from tests.conformance.secrets import ODD, REGISTRY, TOKEN, USUAL, WRONG, Login, Watch
from tests.eventually import eventually

LOGINS = (USUAL, REGISTRY, WRONG, ODD)
FORMS: dict[str, Callable[[Login], str]] = {
    "user": lambda login: login.username,
    "password": lambda login: login.password,
    "as-json": lambda login: json.dumps(login.fields),
    "base64": lambda login: base64.b64encode(login.password.encode()).decode(),
    "basic": lambda login: base64.b64encode(
        f"{login.username}:{login.password}".encode()
    ).decode(),
    "header": lambda login: base64.urlsafe_b64encode(json.dumps(login.fields).encode()).decode(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("login", LOGINS, ids=lambda login: login.username.partition("-")[0])
def test_each_form_is_found_in_a_file(login: Login, form: str, tmp_path: Path) -> None:
    watch = Watch(tmp_path, leave_out=["elsewhere"])
    for folder in ("deep", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text(f"x {FORMS[form](login)} x")
    watch.look()
    assert watch.found == {str(tmp_path / "deep" / "file")}


def test_a_file_is_looked_at_again_when_it_has_changed(tmp_path: Path) -> None:
    watch, file = Watch(tmp_path), tmp_path / "log"
    file.write_text("nothing\n")
    watch.look()
    assert watch.found == set()
    with file.open("a") as log:
        log.write(f"{USUAL.password}\n")
    watch.look()
    assert watch.found == {str(file)}


@pytest.mark.parametrize("place", ["cmdline", "environ"])
def test_arguments_and_variables_of_processes_are_looked_at(place: str, tmp_path: Path) -> None:
    token = "Zq7shownK"  # not the suite's own, which the watch over the whole run looks for
    watch = Watch(tmp_path, token=token)
    words = ["cat", "-", f"pass-{token}"]
    variables = {"PATH": os.environ["PATH"], "PASSWORD": f"pass-{token}"}
    with subprocess.Popen(
        words if place == "cmdline" else ["cat"],
        env=None if place == "cmdline" else variables,
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:

        def is_found() -> bool:
            watch.look()
            return watch.found == {f"/proc/{process.pid}/{place}"}

        eventually(is_found, saying="it is found")


def test_a_pulls_header_is_the_one_place_for_it() -> None:
    watch = Watch(Path("/nowhere"))
    header = FORMS["header"](USUAL)
    watch.told(Request("POST", "/images/create?fromImage=a", {"x-registry-auth": header}, b""))
    assert watch.found == set()
    for told in (
        Request("POST", f"/images/create?fromImage={TOKEN}", {}, b""),
        Request("POST", "/containers/create", {"authorization": header}, b""),
        Request("POST", "/containers/create", {}, json.dumps(USUAL.fields).encode()),
    ):
        watch.found.clear()
        watch.told(told)
        assert len(watch.found) == 1

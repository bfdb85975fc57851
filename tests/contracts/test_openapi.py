"""The OpenAPI document is what the schemas and the table of routes make of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dstack_shim_contracts.schemas import SHAPES, load
from jsonschema import Draft202012Validator

from tools import openapi

FILES_NOT_BODIES = {"task-record", "feature-document"}


@pytest.fixture(scope="module")
def document() -> Any:
    return json.loads(openapi.TARGET.read_text(encoding="utf-8"))


def test_the_file_is_current() -> None:
    assert openapi.TARGET.read_text(encoding="utf-8") == openapi.render(), "run tools/openapi.py"


def test_every_body_of_the_api_is_in_it(document: Any) -> None:
    assert set(document["components"]["schemas"]) >= set(SHAPES) - FILES_NOT_BODIES
    assert not set(document["components"]["schemas"]) & FILES_NOT_BODIES


def test_no_two_schemas_share_a_name() -> None:
    names = [
        name
        for shape in sorted(set(SHAPES) - FILES_NOT_BODIES)
        for name in (shape, *load(shape).get("$defs", {}))
    ]
    assert len(names) == len(set(names))


def test_every_reference_leads_somewhere(document: Any) -> None:
    def references(part: Any) -> list[str]:
        if isinstance(part, dict):
            own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
            return own + [ref for inner in part.values() for ref in references(inner)]
        if isinstance(part, list):
            return [ref for inner in part for ref in references(inner)]
        return []

    found = references(document)
    assert found
    for reference in found:
        prefix, name = reference.rsplit("/", 1)
        assert prefix == "#/components/schemas"
        assert name in document["components"]["schemas"]


def test_its_schemas_are_schemas(document: Any) -> None:
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_every_operation_has_a_name_of_its_own_and_tells_its_errors(document: Any) -> None:
    operations = [
        operation
        for path in document["paths"].values()
        for method, operation in path.items()
        if method in {"get", "post"}
    ]
    assert len({operation["operationId"] for operation in operations}) == len(operations) == 13
    for operation in operations:
        statuses = set(operation["responses"])
        assert "200" in statuses
        if "requestBody" in operation:
            assert {"400", "413", "415"} <= statuses


def run(*arguments: str, target: Path) -> subprocess.CompletedProcess[str]:
    script = (
        "import pathlib, sys; from tools import openapi; "
        f"openapi.TARGET = pathlib.Path({str(target)!r}); openapi.main()"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=openapi.TARGET.parent.parent,
    )


def test_the_script_writes_the_file_and_tells_when_it_is_out_of_date(tmp_path: Path) -> None:
    target = tmp_path / "openapi.json"
    missing = run("--check", target=target)
    assert missing.returncode == 1
    assert "out of date" in missing.stderr
    assert run(target=target).returncode == 0
    assert target.read_text(encoding="utf-8") == openapi.render()
    assert run("--check", target=target).returncode == 0

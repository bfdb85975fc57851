"""Write contracts/openapi.json, the API as an OpenAPI 3.1 document.

The bodies come from the JSON Schemas of the contracts, the routes from the table below. Nothing
serves the document; it is for people and for tools that try an API from its description.
Run it after a change of either: a test compares the file with what this prints.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

from dstack_shim_contracts import schemas

from tools.generated import write_or_check

TARGET: Final = Path(__file__).resolve().parent.parent / "contracts" / "openapi.json"

JSON: Final = "application/json"
PLAIN: Final = "text/plain"
TEXT: Final[dict[str, Any]] = {PLAIN: {"schema": {"type": "string"}}}
DONE: Final = {"description": "Done. The text is a newline.", "content": TEXT}

ERRORS: Final = {
    400: "The body breaks a rule; the text names position or field.",
    404: "Unknown task.",
    409: "Not in this state; the text says why.",
    413: "Body over 1 MiB.",
    415: "The content type is not application/json.",
    500: "The engine or the disk failed; the text says how.",
    502: "The metrics exporter failed.",
}
OF_A_BODY: Final = (400, 413, 415)

TASK_ID: Final = {
    "name": "id",
    "in": "path",
    "required": True,
    "description": "Id given at submit, percent-encoded.",
    "schema": {"type": "string", "minLength": 1},
}


def main() -> None:
    """Write the file, or with ``--check`` tell whether it is current."""
    sys.exit(write_or_check(TARGET, render(), sys.argv[1:], "tools.openapi"))


def render() -> str:
    """The document as the file has it."""
    return json.dumps(document(), indent=2) + "\n"


def document() -> dict[str, Any]:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dstack-shim",
            "version": "2",
            "description": "The HTTP API of a dstack shim. It listens on the loopback interface.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://localhost:10998"}],
        "paths": paths(),
        "components": {"schemas": components()},
    }


def paths() -> dict[str, Any]:
    """Every route. HEAD, which works wherever GET does, is not listed."""
    task = {"parameters": [TASK_ID]}
    return {
        "/api/healthcheck": {"get": _get("healthcheck", "Which shim answers")},
        "/api/shutdown": {"post": _shutdown()},
        "/api/instance/health": {"get": _get("instance-health", "What DCGM says")},
        "/api/instance/info": {"get": _get("instance-info", "GPU vendor and driver")},
        "/api/components": {"get": _get("components", "The installed programs")},
        "/api/components/install": {
            "post": _post("install_component", "Begin to install", "component-install", 409)
        },
        "/api/tasks": {
            "get": _get("task-list", "All tasks"),
            "post": _post("submit_task", "Submit a task", "task-submit", 409, 500),
        },
        "/api/tasks/{id}": {**task, "get": _get("task-info", "One task", 404)},
        "/api/tasks/{id}/terminate": {
            **task,
            "post": {
                **_post("terminate_task", "Terminate a task", "task-terminate", 404, 500),
                "responses": _responses(_answer("task-info"), *OF_A_BODY, 404, 500),
            },
        },
        "/api/tasks/{id}/remove": {
            **task,
            "post": {
                "operationId": "remove_task",
                "summary": "Remove a terminated task",
                "responses": _responses(DONE, 404, 409, 500),
            },
        },
        "/metrics": {
            "get": {
                "operationId": "get_metrics",
                "summary": "Metrics of the shim itself, Prometheus text",
                "responses": _responses({"description": "Metrics.", "content": TEXT}),
            }
        },
        "/metrics/tasks/{id}": {
            **task,
            "get": {
                "operationId": "get_task_metrics",
                "summary": "DCGM metrics of the task's GPUs, Prometheus text",
                "responses": _responses({"description": "Metrics.", "content": TEXT}, 404, 502),
            },
        },
    }


def components() -> dict[str, Any]:
    """The schemas of all bodies, each definition under a name of its own."""
    found: dict[str, Any] = {}
    for name in schemas.SHAPES:
        if name in {"task-record", "feature-document"}:
            continue  # files, not bodies
        schema = schemas.load(name)
        definitions = schema.pop("$defs", {})
        del schema["$schema"], schema["title"]
        for key, definition in {name: schema, **definitions}.items():
            found[key] = _with_component_references(definition)
    return dict(sorted(found.items()))


def _get(answer: str, summary: str, *errors: int) -> dict[str, Any]:
    return {
        "operationId": "get_" + answer.replace("-", "_"),
        "summary": summary,
        "responses": _responses(_answer(answer), *errors),
    }


def _post(operation: str, summary: str, body: str, *errors: int) -> dict[str, Any]:
    return {
        "operationId": operation,
        "summary": summary,
        "requestBody": {"required": True, "content": {JSON: {"schema": _reference(body)}}},
        "responses": _responses(DONE, *OF_A_BODY, *errors),
    }


def _shutdown() -> dict[str, Any]:
    route = _post("shutdown", "Stop serving and exit, or make way for the next file", "shutdown")
    return {**route, "responses": {**route["responses"], "409": _answer("shutdown-refusal")}}


def _answer(name: str) -> dict[str, Any]:
    return {
        "description": schemas.load(name)["description"],
        "content": {JSON: {"schema": _reference(name)}},
    }


def _responses(success: dict[str, Any], *errors: int) -> dict[str, Any]:
    return {
        "200": success,
        **{
            str(status): {"description": ERRORS[status], "content": TEXT}
            for status in sorted(errors)
        },
    }


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _with_component_references(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: value.replace("#/$defs/", "#/components/schemas/")
            if key == "$ref"
            else _with_component_references(value)
            for key, value in schema.items()
        }
    if isinstance(schema, list):
        return [_with_component_references(item) for item in schema]
    return schema


if __name__ == "__main__":
    main()

"""
Read a shim's answers with a release's own models, the way its client does.

Runs inside the release's environment. stdin: {shape: {name: base64 of the body}}; stdout: {shape:
{name: {"read": what the model holds} or {"refused": why}}}. A shape the release does not know is
left out.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import requests
from dstack._internal.server.schemas import runner as models
from dstack._internal.server.services.runner.client import ShimClient

MODELS = {
    "healthcheck": "HealthcheckResponse",
    "instance-health": "InstanceHealthResponse",
    "instance-info": "InstanceInfoResponse",
    "components": "ComponentListResponse",
    "task-list": "TaskListResponse",
    "task-info": "TaskInfoResponse",
}


def read(client: Any, model: Any, body: bytes) -> dict[str, Any]:
    response = requests.Response()
    response.status_code = 200
    response._content = body
    response.headers["Content-Type"] = "application/json"
    response.request = requests.Request("GET", "http://localhost/").prepare()
    try:
        parsed = client._response(model, response)
    except Exception as error:  # noqa: BLE001  whatever it is, the release refused the body
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"read": json.loads(parsed.json())}  # both pydantics have it


def main() -> None:
    client = ShimClient(port=1)
    answers = {
        shape: {
            name: read(client, getattr(models, MODELS[shape]), base64.b64decode(body))
            for name, body in bodies.items()
        }
        for shape, bodies in json.load(sys.stdin).items()
        if hasattr(models, MODELS[shape])
    }
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()

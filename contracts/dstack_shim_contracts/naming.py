"""Names that follow from a task and must be the same in every shim."""

import hashlib


def container_name(name: str, task_id: str) -> str:
    """Name of the container of a task, and of its directory below ``runners/``.

    The name is deterministic, so creating the same task twice meets its own first container.
    """
    # surrogatepass: a name read from a damaged place must not be able to raise here.
    digest = hashlib.sha256(f"{name}/{task_id}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"{name}-{digest[:8]}"

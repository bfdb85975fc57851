"""Good and bad examples of every shape, for the tests of both sides.

``good/<shape>/<name>.json`` are documents as they really occur. ``bad/<shape>/<rule>.json`` are
each named by the one rule they break; ``bad/fields.json`` says which field a reader has to name.
Bad answers are what a shim must never send: their schema refuses them, while readers forgive some
of them (our own one null for text, servers a number for text or a null task list). Shapes are
those of ``schemas.SHAPES``.
"""

import json
from importlib import resources
from typing import Final

import attrs

_HERE: Final = resources.files(__name__)


@attrs.frozen
class Example:
    """One document as it stands on the wire or on disk.

    ``field`` is the JSON path that the error about a bad one names, None for a good one.
    """

    shape: str
    name: str
    raw: bytes = attrs.field(repr=False)
    field: str | None = None

    def __str__(self) -> str:
        return f"{self.shape}/{self.name}"


def good(shape: str) -> tuple[Example, ...]:
    """The good examples of a shape, by name."""
    return tuple(Example(shape, name, raw) for name, raw in _files("good", shape))


def bad(shape: str) -> tuple[Example, ...]:
    """The bad examples of a shape, by the rule they break."""
    fields = json.loads((_HERE / "bad" / "fields.json").read_text(encoding="utf-8"))
    return tuple(
        Example(shape, name, raw, fields[f"{shape}/{name}"]) for name, raw in _files("bad", shape)
    )


def _files(kind: str, shape: str) -> list[tuple[str, bytes]]:
    files = (_HERE / kind / shape).iterdir()
    return sorted((file.name.removesuffix(".json"), file.read_bytes()) for file in files)

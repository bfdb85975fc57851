"""
Server releases × kinds of shims: is a shim restarted under a running task, by dstack's own decision and
with the extension. `docs/skew.md` is written from what the tests of each release found.

    python -m tests.server.skew     docs/skew.md from build/skew, once `./dev prove` has been through
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dstack_shim_server import shapes
from tests.contracts.test_gate import ABSENT, OURS, component, healthcheck
from tests.releases import environments
from tests.server import truth
from tests.server.dstack_server import DstackServer
from tests.server.stub_shim import StubShim

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "skew.md"
FOUND = ROOT / "build" / "skew"

OLD, KEEPS, NEW = ("0.21.2", ABSENT), ("0.21.3", ABSENT), ("0.22.5", ABSENT)
OURS_OLD, OURS_NEW = ("0.22.4", OURS), ("0.22.5.post1", OURS)
# What runs, what is installed, and how a column is headed.
MOVES = (
    (OLD, NEW, "0.21.2 to 0.22.5"),
    (KEEPS, NEW, "0.21.3 to 0.22.5"),
    (NEW, OLD, "0.22.5 back to 0.21.2"),
    (("latest", ABSENT), NEW, "a dev build to 0.22.5"),
    (OLD, OURS_NEW, "0.21.2 to ours"),
    (NEW, OURS_NEW, "0.22.5 to ours"),
    (OURS_OLD, OURS_NEW, "ours to ours"),
    (OURS_NEW, NEW, "ours to 0.22.5"),
    (OURS_NEW, OLD, "ours back to 0.21.2"),
)

INTRO = """\
# Which servers and shims were tried together

A host with one running task, a shim that runs and another file that is installed: is the shim
restarted? Each cell is what a running server of that release did, first by dstack's own decision, then
with the extension. "ours" is a shim of this repository; all others are dstack's own.

Written from what `./dev prove` found (`python -m tests.server.skew`); `./dev test` holds two of its rows
to what it finds itself.

"""


def row(version: str, stock: Sequence[bool], ours: Sequence[bool]) -> str:
    """One line of the table."""
    cells = (f"{_word(before)} → {_word(now)}" for before, now in zip(stock, ours, strict=True))
    return f"| {version} | {' | '.join(cells)} |"


def decided(server: DstackServer, shim: StubShim) -> list[bool]:
    """What the server decides about each move, as it is loaded now."""
    found = []
    for (running, has), (installed, file_has), name in MOVES:
        seen = truth.check(
            server,
            shim,
            _document(healthcheck(running, has)),
            _document(component(installed, file_has)),
            truth.RUNNING,
            instance=name.replace(" ", "-"),
        )
        found.append(seen.restarted)
    return found


def note(version: str, line: str) -> None:
    """Leave a line for the page."""
    FOUND.mkdir(parents=True, exist_ok=True)
    (FOUND / version).write_text(line + "\n", "utf-8")


def page() -> str:
    """The page from the lines that were left."""
    head = ["server", *(name for *_, name in MOVES)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += [(FOUND / version).read_text("utf-8").strip() for version in environments.ALL_SERVERS]
    shapes_tried = "\n".join(f"- {shape}" for shape in shapes.known_shapes())
    return f"{INTRO}{chr(10).join(lines)}\n\nReleases whose decision code is the same, by the digest of its source:\n\n{shapes_tried}\n"


def _document(found: object) -> Mapping[str, object]:
    assert isinstance(found, dict)
    return found


def _word(restarted: bool) -> str:
    return "yes" if restarted else "no"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")

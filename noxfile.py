"""Every check by its name; `./dev NAME -- arguments` runs one, tools/run_all.py runs them all.

Sessions use the environment `./dev` made (``.venv``), so nox makes none of its own; only ``fast``
runs on every Python, in environments of ``tools.interpreters``. Each pytest run leaves its counts
in ``DSTACK_SHIM_COUNTS`` for the closing line.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

from tools import interpreters

nox.options.default_venv_backend = "none"
nox.options.error_on_missing_interpreters = False
nox.options.envdir = "build/nox"

TREE = ["contracts", "shim", "server_ext", "tests", "tools", "noxfile.py"]
TREE += [name for name in ("benchmarks", "demo") if Path(name).is_dir()]
SANDBOX = "tests/lab/sandbox"
UPGRADE = "tests/engine/test_upgrade.py"  # a session of its own, beside the others
ENVIRONMENTS = "tests/releases/environments.py"
SANDBOXED = ("engine", "server", "conformance", "crash", "e2e")  # as tests/conftest.py has it
VERSIONS = [nox.param(version, id=version) for version in interpreters.SUPPORTED]


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    _run(session, "-m", "ruff", "check", *TREE)
    _run(session, "-m", "ruff", "format", "--check", *TREE)


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict, over everything."""
    _run(session, "-m", "mypy", *TREE)


@nox.session
@nox.parametrize("version", VERSIONS)
def fast(session: nox.Session, version: str) -> None:
    """Tests that need no engine, on each Python.

    The one of .venv measures coverage, the newest tries every property on the whole sample; that
    both slow a run down is why they are not the same. The others are there for what differs.
    """
    found = interpreters.interpreters()
    if version not in found:
        session.skip(f"this machine has no Python {version}")
    python = interpreters.environment(version)
    chosen = session.posargs or [
        "tests",
        *_ignore("package", "releases", "mutants", "simulation", *SANDBOXED),
    ]
    if version != list(found)[-1] and not os.environ.get("DSTACK_SHIM_FULL"):
        chosen = ["--hypothesis-profile=few", *chosen]
    main = version == interpreters.RUNNING
    which = "not sandbox" if main else "not sandbox and not one_python"
    chosen = ["-m", which, "--quiet", *chosen]
    _pytest(session, f"fast-{version}", *chosen, python=python, cover=main)


@nox.session
def engine(session: nox.Session) -> None:
    """Tests on a real Docker Engine and real mounts, in private namespaces."""
    _make_release_environments(session)
    chosen = session.posargs or ["tests/engine", "tests/shim", f"--ignore={UPGRADE}"]
    built = _built(session)
    _pytest(session, "engine", "-m", "sandbox", *chosen, sandbox=True, cover=True, env=built)


@nox.session
def upgrade(session: nox.Session) -> None:
    """One file replaced by another in place, under load, by files of every kind."""
    _make_release_environments(session)
    chosen = session.posargs or [UPGRADE]
    _pytest(session, "upgrade", *chosen, sandbox=True, env=_built(session))


@nox.session
def crash(session: nox.Session) -> None:
    """The shim killed at every call, its disk cut off, its host churned."""
    chosen = session.posargs or ["tests/crash"]
    _pytest(session, "crash", *chosen, sandbox=True, env=_built(session))


@nox.session
def simulation(session: nox.Session) -> None:
    """Seeded schedules of requests, faults and crashes on the real core. They do not depend on
    the Python, and measuring coverage would cost as much again; the core's own tests do both.
    """
    _pytest(session, "simulation", *(session.posargs or ["tests/simulation"]))


@nox.session
def mutants(session: nox.Session) -> None:
    """Rules turned off one at a time: some test must miss each."""
    _pytest(session, "mutants", *(session.posargs or ["tests/mutants"]))


@nox.session
def package(session: nox.Session) -> None:
    """The single file and the wheels, as a host and an installer meet them."""
    _pytest(session, "package", *(session.posargs or ["tests/package"]))


@nox.session
def releases(session: nox.Session) -> None:
    """Contract tests against the models of dstack's own releases."""
    _make_release_environments(session)
    _pytest(session, "releases", *(session.posargs or ["tests/releases"]))


@nox.session
def server(session: nox.Session) -> None:
    """The plugin in real running dstack servers."""
    _make_release_environments(session)
    _pytest(session, "server", *(session.posargs or ["tests/server"]), sandbox=True)


@nox.session
def conformance(session: nox.Session) -> None:
    """The black-box suite; `-- --shim FILE` judges another shim. `./dev test` runs its sample."""
    chosen = list(session.posargs)
    if not any(word.split("=")[0] == "--shim" for word in chosen):
        chosen += ["--shim", _built(session)["DSTACK_SHIM_FILE"]]
    if "DSTACK_SHIM_COUNTS" in os.environ and not os.environ.get("DSTACK_SHIM_FULL"):
        chosen += ["--sample"]
    _pytest(session, "conformance", "tests/conformance", *chosen, sandbox=True)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Readers of foreign bytes under coverage-guided noise, until the time is up or one falls."""
    python = interpreters.environment(interpreters.RUNNING, "fuzz", "atheris==3.0.0")
    session.run(str(python), "-m", "tests.fuzz", *session.posargs, external=True)


@nox.session
def demo(session: nox.Session) -> None:
    """The whole path, told as a timeline."""
    _make_release_environments(session, "0.21.2")
    _fetch_wheels(session)
    _run(session, "demo/run.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """What it costs and how long it takes; `-- --peer FILE` measures another shim beside it."""
    _run(session, "-m", "tools.build_shim")
    words = (sys.executable, "-m", "benchmarks.run", *session.posargs)
    session.run(SANDBOX, *words, external=True)


@nox.session
def build(session: nox.Session) -> None:
    """dist/dstack-shim, one executable file."""
    _run(session, "-m", "tools.build_shim", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The pages as a site in build/site; a broken link or an unlisted page fails."""
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # the theme's notice of its successor, at every run
    session.run(
        sys.executable, "-m", "mkdocs", "build", *session.posargs, external=True, env=quiet
    )


@nox.session
def evidence(session: nox.Session) -> None:
    """Add up what full counts have come to and write it into docs/testing.md."""
    _run(session, "-m", "tools.evidence")


@nox.session
def coverage(session: nox.Session) -> None:
    """Put the coverage of the runs before together and hold it against its bounds."""
    _run(session, "-m", "tools.coverage_bounds")


@nox.session
def pin(session: nox.Session) -> None:
    """Pin anew: what we develop with, for every Python; what the single file bundles, for 3.10."""
    _compile(session, "constraints", "--universal", "--upgrade", "--python-version", "3.10")
    python = str(interpreters.interpreters()["3.10"])
    target = ("--python", python, "--python-platform", "linux", "--constraints", "constraints.txt")
    # Only those parts of rich need them that tools/left_out.py leaves out.
    unused = ("markdown-it-py", "mdurl", "pygments")
    without = (word for package in unused for word in ("--no-emit-package", package))
    _compile(session, "tools/bundle", *target, *without)


def _compile(session: nox.Session, name: str, *arguments: str) -> None:
    """``name.in`` to ``name.txt``, with hashes, without ours and without any index address."""
    ours = ("dstack-shim", "dstack-shim-contracts", "dstack-shim-server")
    _run(
        session,
        *("-m", "uv", "pip", "compile", "--quiet", "--no-header", *arguments),
        *("--generate-hashes", "--no-emit-index-url"),
        *(word for package in ours for word in ("--no-emit-package", package)),
        *(f"{name}.in", "--output-file", f"{name}.txt"),
    )


def _run(session: nox.Session, *arguments: str) -> None:
    session.run(sys.executable, *arguments, external=True)


def _pytest(
    session: nox.Session,
    name: str,
    *arguments: str,
    python: Path | None = None,
    sandbox: bool = False,
    cover: bool = False,
    env: dict[str, str] | None = None,
) -> None:
    """One pytest run named ``name``. No test at all is a failure: a filter that matches nothing,
    or a folder that vanished, must not pass unseen.
    """
    command = [str(python or sys.executable), "-m"]
    if cover and "DSTACK_SHIM_COUNTS" in os.environ:  # only whole runs are held against bounds
        command += ["coverage", "run", "-m"]
    # A module that does not import is a failure; the others still have something to say.
    command += ["pytest", "--continue-on-collection-errors", *arguments]
    if os.environ.get("DSTACK_SHIM_FULL"):
        part = os.environ.get("DSTACK_SHIM_PART", "1/1")
        command += ["--full", f"--part={part}", "--timeout=3600"]
    if sandbox:
        _fetch_wheels(session)
        command = [SANDBOX, *command]
    session.run(*command, external=True, env={"DSTACK_SHIM_RUN": name, **(env or {})})


def _built(session: nox.Session) -> dict[str, str]:
    """What tells tests to run the single file, as hosts do; a whole run has built it before."""
    if "DSTACK_SHIM_COUNTS" not in os.environ:
        _run(session, "-m", "tools.build_shim")
    return {"DSTACK_SHIM_FILE": str(Path("dist/dstack-shim").absolute())}


def _ignore(*folders: str) -> list[str]:
    return [f"--ignore=tests/{folder}" for folder in folders]


def _make_release_environments(session: nox.Session, *versions: str) -> None:
    """While the network is there: inside the sandbox's own there is none."""
    _run(session, ENVIRONMENTS, *versions)


def _fetch_wheels(session: nox.Session) -> None:
    """What a build of the single file needs, while the network is there."""
    _run(session, "-m", "tools.bundle")

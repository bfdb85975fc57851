"""Fuzz one target, guided by coverage, for a number of seconds.

    ./dev fuzz -- [TARGET …] [--seconds N]

Inputs that reach new code are kept in build/fuzz/TARGET and are where the next run begins. A find
stops the run and is left there as crash-…; it becomes a test by moving it to tests/fuzz/finds.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

WORK = Path(__file__).parents[2] / "build" / "fuzz"


def main(arguments: list[str]) -> int:
    """Each target in a process of its own; 0 if none of them found anything."""
    parser = argparse.ArgumentParser(prog="./dev fuzz --")
    parser.add_argument("targets", nargs="*", default=[])
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        _fuzz(options.targets[0], options.seconds)
    return max(_run(name, options.seconds) for name in options.targets or TARGETS)


TARGETS = ("record", "request", "pull", "keys")


def _run(name: str, seconds: int) -> int:
    print(f"{name}: {seconds} s", flush=True)  # noqa: T201 - a person waits
    inside = [sys.executable, "-m", "tests.fuzz", name, f"--seconds={seconds}", "--inside"]
    return subprocess.run(inside, check=False).returncode


def _fuzz(name: str, seconds: int) -> None:
    """Does not return: libFuzzer ends the process, with 77 after a find."""
    import atheris  # noqa: PLC0415 - there in the environment of this session only

    with atheris.instrument_imports(include=["dstack_shim", "dstack_shim_contracts"]):
        from tests.fuzz import targets  # noqa: PLC0415 - must be imported under instrumentation

    corpus = WORK / name
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in targets.seeds(name):
        (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    words = [
        f"-max_total_time={seconds}",
        "-max_len=8192",
        "-timeout=20",
        "-print_final_stats=1",
        f"-artifact_prefix={corpus.parent}/{name}-",
        str(corpus),
    ]
    atheris.Setup([sys.argv[0], *words], targets.TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`./dev build`: dist/dstack-shim, the whole shim as one executable file.

A zip behind a few lines of shell. It needs a Python from 3.10 on and nothing else: our packages and
the pure ones they use are inside, as byte code for every Python found here and as source for any
other. The same sources and the same Pythons give the same bytes, wherever they are built.
"""

from __future__ import annotations

import argparse
import os
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dstack_shim_contracts.codec import encode
from dstack_shim_contracts.features import (
    FEATURE_DOCUMENT_NAME,
    FEATURES,
    TAKEOVER_PROTOCOL,
    FeatureDocument,
    FileImplementation,
)
from packaging.version import InvalidVersion, Version

from dstack_shim import build
from tools import bundle, byte_code, interpreters

HERE = Path(__file__).parent
PARTS = HERE / "single_file"
LARGEST = 12_000_000  # bytes; what a host downloads at each upgrade
EPOCH = (1980, 1, 1, 0, 0, 0)  # the oldest time a zip can hold


def main(arguments: list[str]) -> int:
    """Build, say what was built; 1 with a message if it cannot be."""
    parser = argparse.ArgumentParser(prog="./dev build")
    parser.add_argument("--version", type=reported_version, default=build.DEFAULT_VERSION)
    parser.add_argument("--output", type=Path, default=HERE.parent / "dist", help="folder")
    options = parser.parse_args(arguments)
    output = Path(os.environ.get("DEV_CALLER_DIR", ".")) / options.output
    try:
        file = build_shim(options.version, output)
    except bundle.BundleError as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    pythons = ", ".join(interpreters.interpreters())
    print(
        f"{file}: version {options.version}, {file.stat().st_size:,} bytes, byte code for {pythons}"
    )
    return 0


def reported_version(text: str) -> str:
    """A version servers can compare, as it will be reported; ``ArgumentTypeError`` otherwise."""
    try:
        version = Version(text)
    except InvalidVersion:
        raise argparse.ArgumentTypeError(f"{text!r} is no PEP 440 version") from None
    if text != text.strip():
        raise argparse.ArgumentTypeError("a version has no spaces around it")
    if not any(version.release):
        raise argparse.ArgumentTypeError("servers take 0.0.0 for the first API, which is gone")
    return text


def build_shim(version: str, output: Path) -> Path:
    """Write ``output/dstack-shim``, which replaces an older one only once it answers."""
    others, ours = bundle.modules()
    ours["single_file_start.py"] = (PARTS / "start.py").read_bytes()
    entries = _entries(others, ours, version)
    output.mkdir(parents=True, exist_ok=True)
    target = output / "dstack-shim"
    partial = output / ".dstack-shim.partial"
    _write(partial, entries)
    _prove(partial, version)
    partial.replace(target)
    return target


def _entries(others: bundle.Files, ours: bundle.Files, version: str) -> bundle.Files:
    entries = {
        "__main__.py": (PARTS / "main.py").read_bytes(),
        FEATURE_DOCUMENT_NAME: feature_document(version),
        **bundle.licences(),
    }
    pythons = interpreters.interpreters().values()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for code in pool.map(lambda python: _byte_code(python, others, ours, version), pythons):
            entries.update(code)
    unknown = {"single_file_facts.py": _facts(version, {"modules": [], "linked": []})}
    for name, content in {**others, **ours, **unknown}.items():
        entries[f"source/{name}"] = content
    return entries


def feature_document(version: str) -> bytes:
    """What the file says of itself without being run."""
    implementation = FileImplementation(build.IMPLEMENTATION_NAME, build.IMPLEMENTATION_VERSION)
    document = FeatureDocument(
        build.NAME, version, tuple(FEATURES), implementation, takeover=TAKEOVER_PROTOCOL
    )
    return encode(document)


def _byte_code(
    python: Path, others: bundle.Files, ours: bundle.Files, version: str
) -> bundle.Files:
    """What ``python`` compiled, below the name of its tree."""
    tree = byte_code.tree(python, others, ours)
    facts = byte_code.compile_one(python, "single_file_facts.py", _facts(version, tree.imports))
    return {f"{tree.name}/{name}": code for name, code in {**tree.code, **facts}.items()}


def _facts(version: str, seen: dict[str, list[str]]) -> bytes:
    return (
        f"VERSION = {version!r}\n"
        f"MODULES = {tuple(seen['modules'])!r}\n"
        f"LINKED = {tuple(seen['linked'])!r}\n"
    ).encode()


def _write(file: Path, entries: bundle.Files) -> None:
    with file.open("wb") as stream:
        stream.write((PARTS / "header.sh").read_bytes())
        with zipfile.ZipFile(stream, "w") as archive:
            for name in sorted(entries):
                member = zipfile.ZipInfo(name, EPOCH)
                member.external_attr = 0o644 << 16
                member.create_system = 3  # Unix: the same bytes whatever builds it
                archive.writestr(member, entries[name], zipfile.ZIP_DEFLATED, 6)
    file.chmod(0o755)
    if file.stat().st_size > LARGEST:
        raise bundle.BundleError(f"{file.stat().st_size:,} bytes are more than {LARGEST:,}")


def _prove(file: Path, version: str) -> None:
    wanted = f"dstack-shim version {version}\n"
    for python in interpreters.interpreters().values():
        answer = byte_code.ask(python, "-I", "-S", file, "--version")
        if answer != wanted:
            raise bundle.BundleError(f"{python} answers {answer!r} to --version")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

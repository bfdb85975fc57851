"""
Write server_ext's table of known dstack releases from their published wheels.

    tools/known_shapes.py --fetch DIR 0.20.1 … 0.22.5    unpack the wheels into DIR/<version> first
    tools/known_shapes.py DIR                            make the table of all that is in DIR

Run it when a dstack release appears, read what changed in the functions it names, extend the tests,
and only then commit the table. Nothing of dstack is imported: sources are parsed.
"""

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from packaging.version import Version

from dstack_shim_server import shapes

TABLE = Path(shapes.__file__).with_name("known_shapes.json")


def main() -> None:
    """Fetch what was asked for, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--fetch", action="store_true", help="download the releases named")
    parser.add_argument("directory", type=Path)
    parser.add_argument("versions", nargs="*")
    arguments = parser.parse_args()
    if arguments.fetch:
        for version in arguments.versions:
            fetch(version, arguments.directory / version)
    found = list(grouped(arguments.directory))
    table = {"shapes": [{"releases": r, "functions": f} for r, f in found]}
    TABLE.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    print(f"{TABLE}: {len(found)} shapes of {sum(len(r) for r, _ in found)} releases")


def fetch(version: str, target: Path) -> None:
    """Unpack the wheel of one release, without its dependencies."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--target", str(target), f"dstack=={version}"]
    subprocess.run(command, check=True, timeout=300)


def grouped(directory: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Group neighbouring releases whose decision code is the same; leave out those without one."""
    groups: list[tuple[list[str], dict[str, str]]] = []
    for root in sorted(directory.iterdir(), key=release_of):
        functions = dict(digests(root))
        if not has_decision(functions):
            continue
        if not groups or groups[-1][1] != functions:
            groups.append(([], functions))
        groups[-1][0].append(str(release_of(root)))
    return groups


def release_of(root: Path) -> Version:
    """Return the version of the dstack found in a directory, by its metadata."""
    found = [d.version for d in distributions(path=[str(root)]) if d.name == "dstack"]
    if len(found) != 1:
        raise SystemExit(f"{root}: expected one dstack, found {len(found)}")
    return Version(found[0])


def has_decision(functions: dict[str, str]) -> bool:
    """Say whether all functions of the client are there: 0.20.0 and before have none."""
    prefix = f"{shapes.CLIENT_MODULE}:{shapes.CLIENT_CLASS}."
    return all(prefix + name in functions for name in shapes.CLIENT_FUNCTIONS)


def digests(root: Path) -> Iterator[tuple[str, str]]:
    """Yield full name and digest of each function the extension patches."""
    client = parse(root, shapes.CLIENT_MODULE)
    classes = [
        node
        for node in client.body
        if isinstance(node, ast.ClassDef) and node.name == shapes.CLIENT_CLASS
    ]
    for name in shapes.CLIENT_FUNCTIONS:
        for node in functions_named(name, classes[0]):
            full = f"{shapes.CLIENT_MODULE}:{shapes.CLIENT_CLASS}.{name}"
            yield full, shapes.digest_of_node(node)
    for module in shapes.CHECK_MODULES:
        for node in functions_named(shapes.INSTALL, parse(root, module)):
            yield f"{module}:{shapes.INSTALL}", shapes.digest_of_node(node)


def parse(root: Path, module: str) -> ast.Module:
    """Parse a module's source; one that does not exist is empty."""
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text("utf-8") if path.exists() else "")


def functions_named(name: str, scope: ast.Module | ast.ClassDef) -> list[ast.FunctionDef]:
    """Return the functions of that name directly in a module or class."""
    return [node for node in scope.body if isinstance(node, ast.FunctionDef) and node.name == name]


if __name__ == "__main__":
    main()

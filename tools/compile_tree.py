"""Run by each Python the single file shall have byte code for: ``compile_tree.py SOURCE TARGET``.

Compiles every module below SOURCE to the same name ending in ``.pyc`` below TARGET, in one process
and in a fixed order: with PYTHONHASHSEED=0 and relative paths the bytes are the same wherever it
is done. The code carries no time and no path of this machine, and is never compared with a source.
"""

from __future__ import annotations

import py_compile
import sys
from pathlib import Path


def main(source: Path, target: Path) -> None:
    """Compile all of it; a module that does not compile is an error."""
    for file in sorted(source.rglob("*.py")):
        name = file.relative_to(source)
        py_compile.compile(
            str(file),
            cfile=str((target / name).with_suffix(".pyc")),
            dfile=f"dstack-shim/{name}",
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Shim files to upgrade to: the built one under other versions, sound or broken on purpose.

    content = variant(built, "0.22.5.post1")                      # sound
    content = variant(built, "0.22.5.post2", shell=WHEN_TAKING_OVER + "exit 0")
    content = variant(built, "0.22.5.post3", patch="daemon.Daemon.run = …")

A variant has the built file's own zip behind another header, and a document that says its version,
so it takes a moment to make and is a different content each time.
"""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from pathlib import Path

from dstack_shim_contracts.api import SHIM
from dstack_shim_contracts.features import FEATURE_DOCUMENT_NAME

WHEN_TAKING_OVER = '[ -n "$DSTACK_SHIM_TAKEOVER" ] && '
WHEN_CHECKED = '[ "$1" = check ] && '

_HEADER = """\
#!/bin/sh
[ "$*" = --version ] && {{ echo "dstack-shim version {version}"; exit 0; }}
{shell}
exec python3 -I -S -X utf8 "$0" "$@"
"""
_PATCHED = """\
#!/bin/sh
[ "$*" = --version ] && {{ echo "dstack-shim version {version}"; exit 0; }}
{shell}
exec python3 -I -S -X utf8 -c '
import sys
sys.argv[:1] = []
import _frozen_importlib_external as files
magic = int.from_bytes(files.MAGIC_NUMBER[:2], "little")
tree = f"{{sys.implementation.cache_tag}}-{{magic}}"
sys.path[:0] = [f"{{sys.argv[0]}}/{{tree}}", f"{{sys.argv[0]}}/source"]
from dstack_shim import daemon, takeover, upgrade
{patch}
from dstack_shim.cli import main
sys.exit(main())' "$0" "$@"
"""


def variant(
    built: Path, version: str, *, shell: str = "", patch: str = "", takeover: int | None = 1
) -> bytes:
    """The built file as ``version``. ``shell`` runs before Python; ``patch`` is Python (without
    single quotes) that runs before the command line is read, with ``daemon``, ``takeover`` and
    ``upgrade`` at hand.
    """
    template = _PATCHED if patch else _HEADER
    header = template.format(version=version, shell=shell, patch=patch).encode()
    whole = built.read_bytes()
    raw = io.BytesIO(header + whole[whole.index(b"PK\x03\x04") :])
    with zipfile.ZipFile(raw, "a") as archive:
        document = json.loads(archive.read(FEATURE_DOCUMENT_NAME))
        document.update(version=version, takeover=takeover)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # the name is there twice; the last counts
            archive.writestr(zipfile.ZipInfo(FEATURE_DOCUMENT_NAME), json.dumps(document))
    return raw.getvalue()


def foreign(version: str) -> bytes:
    """A shim of another make: it tells its version and knows nothing of ours."""
    return f'#!/bin/sh\necho "{SHIM} version {version}"\n'.encode()

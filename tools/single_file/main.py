# The start of the single file. Every Python must be able to read this text, however old: what it
# says on a host without a fit one is its purpose. Byte code lies in one tree a Python, the sources
# in another for those without.
import os
import sys


def find_newer():
    for version in ("3.13", "3.12", "3.11", "3.10"):
        for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
            path = os.path.join(folder, "python" + version)
            if os.access(path, os.X_OK):
                return path
    return None


def start_newer():
    newer = find_newer()
    if newer and not os.environ.get("DSTACK_SHIM_NO_OTHER_PYTHON"):
        os.environ["DSTACK_SHIM_NO_OTHER_PYTHON"] = "1"  # a name may lie about its version
        os.execv(newer, [newer, "-I", "-S", "-X", "utf8", sys.argv[0]] + sys.argv[1:])
    have = ".".join(map(str, sys.version_info[:3]))
    sys.stderr.write("dstack-shim: python3 is %s here; 3.10 or newer is needed\n" % have)
    sys.exit(1)


if sys.version_info < (3, 10):
    start_newer()
# This one is fit; what it runs itself, the file with --version for one, looks again.
os.environ.pop("DSTACK_SHIM_NO_OTHER_PYTHON", None)

import _frozen_importlib_external  # its number tells which byte code this Python can read

magic = int.from_bytes(_frozen_importlib_external.MAGIC_NUMBER[:2], "little")
archive = sys.path[0]
tree = "%s-%d" % (sys.implementation.cache_tag, magic)
sys.path[:1] = [os.path.join(archive, tree), os.path.join(archive, "source")]

from single_file_start import run

sys.exit(run(sys.argv[1:]))

"""The host's certificate authorities, under the name by which requests asks for some.

certifi itself would write its own list to a temporary file at each start out of a zip, and would
not know the authorities a host's operator added.
"""

from __future__ import annotations

import os
import ssl

__version__ = "0"

# Debian and Ubuntu; Fedora and Red Hat; SUSE; Alpine.
KNOWN = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


def where() -> str:
    """Path of the bundle: the environment's, OpenSSL's own, or the first known one that exists."""
    paths = ssl.get_default_verify_paths()
    candidates = (os.environ.get(paths.openssl_cafile_env), paths.cafile, *KNOWN)
    return next((path for path in candidates if path and os.path.exists(path)), KNOWN[0])


def contents() -> str:
    """The bundle's text."""
    with open(where(), encoding="utf-8") as file:
        return file.read()

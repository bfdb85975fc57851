#!/bin/sh
for python in python3 python3.13 python3.12 python3.11 python3.10; do
    if command -v "$python" >/dev/null 2>&1; then exec "$python" -I -S -X utf8 "$0" "$@"; fi
done
echo "dstack-shim: this host has no python3; 3.10 or newer is needed" >&2
exit 1

"""The rules of a submitted task that its types cannot say.

Names end up as names of directories, containers and labels, paths as mounts made by root. So they
are checked before anything is created, with the field named in the error.
"""

import re
import unicodedata
from collections.abc import Iterator
from typing import Any, Final

import attrs
from dstack_shim_contracts.api import TaskConfig
from dstack_shim_contracts.errors import BodyError

MAX_ID_LENGTH: Final = 256
MAX_NAME_LENGTH: Final = 200
"""The longest name that leaves room for the hash in a file name of 255 bytes."""
MAX_VOLUME_NAME_BYTES: Final = 255
"""A volume's name is the name of its mount point."""

MAX_ITEMS: Final = 1000
"""Of any list. Items are cheap to send and grow when their defaults are written out: without a
bound a body of 1 MiB could become a record too large to be read back."""

MAX_CPU: Final = 9_223_372_036
"""Engines count billionths of a core in 64 bits."""

NETWORK_MODES: Final = ("", "host", "bridge")

_ENGINE_NAME: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")


def validate_submit(config: TaskConfig) -> None:
    """Raise :class:`BodyError` for the first field that breaks a rule."""
    _check_lengths(config)
    _check_names(config)
    _check_amounts(config)
    _check_volumes(config)
    _check_mounts(config)
    for path, text in _texts(config, ""):
        if "\0" in text:
            raise BodyError(path, "no NUL character")


def _check_lengths(config: TaskConfig) -> None:
    for attribute in attrs.fields(TaskConfig):
        value = getattr(config, attribute.name)
        if isinstance(value, tuple) and len(value) > MAX_ITEMS:
            raise BodyError(attribute.name, f"at most {MAX_ITEMS} items")


def _check_names(config: TaskConfig) -> None:
    _check_file_name("id", config.id)
    if len(config.id) > MAX_ID_LENGTH:
        raise BodyError("id", f"at most {MAX_ID_LENGTH} characters")
    if not config.name:
        raise BodyError("name", "a non-empty string")
    if len(config.name) > MAX_NAME_LENGTH:
        raise BodyError("name", f"at most {MAX_NAME_LENGTH} characters")
    if not _ENGINE_NAME.fullmatch(config.name):
        raise BodyError("name", "letters, digits, _, . and -, the first a letter or digit")
    if not config.image_name:
        raise BodyError("image_name", "a non-empty string")


def _check_amounts(config: TaskConfig) -> None:
    for field in ("cpu", "memory", "shm_size"):
        if getattr(config, field) < 0:
            raise BodyError(field, "a number not below 0")
    if config.cpu > MAX_CPU:
        raise BodyError("cpu", f"a number not above {MAX_CPU}")
    if config.gpu < -1:
        raise BodyError("gpu", "-1 for all idle GPUs, or a number of them")
    if config.network_mode not in NETWORK_MODES:
        raise BodyError("network_mode", "host or bridge")


def _check_volumes(config: TaskConfig) -> None:
    for index, volume in enumerate(config.volumes):
        _check_volume_name(f"volumes[{index}].name", volume.name)
        # For some backends this is part of a path below /dev, for others a path of its own.
        if volume.device_name is not None and ".." in volume.device_name.split("/"):
            raise BodyError(f"volumes[{index}].device_name", "a device name without ..")
    for index, mount in enumerate(config.volume_mounts):
        _check_volume_name(f"volume_mounts[{index}].name", mount.name)


def _check_mounts(config: TaskConfig) -> None:
    for index, volume_mount in enumerate(config.volume_mounts):
        _check_path(f"volume_mounts[{index}].path", volume_mount.path)
    for index, instance_mount in enumerate(config.instance_mounts):
        at = f"instance_mounts[{index}]"
        _check_path(f"{at}.instance_path", instance_mount.instance_path)
        _check_path(f"{at}.path", instance_mount.path)
    for index, device in enumerate(config.gpu_devices):
        at = f"gpu_devices[{index}]"
        _check_path(f"{at}.path_on_host", device.path_on_host)
        _check_path(f"{at}.path_in_container", device.path_in_container)


def _check_volume_name(field: str, name: str) -> None:
    _check_file_name(field, name)
    if len(name.encode("utf-8", "replace")) > MAX_VOLUME_NAME_BYTES:
        raise BodyError(field, f"at most {MAX_VOLUME_NAME_BYTES} bytes")


def _check_file_name(field: str, name: str) -> None:
    if not name:
        raise BodyError(field, "a non-empty string")
    if "/" in name or name in {".", ".."}:
        raise BodyError(field, "a name, not a path")
    if _has_control_characters(name):
        raise BodyError(field, "no control characters")


def _check_path(field: str, path: str) -> None:
    if not path.startswith("/"):
        raise BodyError(field, "an absolute path")
    if ".." in path.split("/"):
        raise BodyError(field, "a path without ..")
    if _has_control_characters(path):
        raise BodyError(field, "no control characters")


def _has_control_characters(text: str) -> bool:
    return any(unicodedata.category(character) == "Cc" for character in text)


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every string within a model, with its JSON path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _texts(item, f"{path}[{index}]")
    elif attrs.has(type(value)):
        for attribute in attrs.fields(type(value)):
            member = f"{path}.{attribute.name}" if path else attribute.name
            yield from _texts(getattr(value, attribute.name), member)

"""``kvstore serve``: fit the settings to this machine, run the daemon, or print the
configuration."""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import stat
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path

from kvstore import __version__, sizing
from kvstore.cli_status import FAILURE, OK
from kvstore.config import SCHEMA, Settings
from kvstore.core.errors import ConfigError, InvariantError, KVStoreError
from kvstore.sizing import Config

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def run(settings: Settings, namespace: argparse.Namespace) -> int:
    """Serve until a signal, or print the configuration. Raises ConfigError for settings that don't
    fit this machine."""
    machine = sizing.look(settings)
    config = sizing.fit(settings, machine)
    if namespace.print_config:
        print_config(settings, config, namespace.json)
        return OK
    logging.basicConfig(stream=sys.stderr, level=config.log.level.upper(), format=LOG_FORMAT)
    short = sizing.shortage(settings, config.nvme, machine)
    if short:
        logging.warning("%s", short)
    if settings.socket_is_default():
        secure_folder(config.socket.parent)
    return _serve(config, settings.notify_socket())


def secure_folder(folder: Path) -> None:
    """Make a private folder, or check that one that is there is ours alone: whoever owns the
    folder of the socket decides which daemon engines talk to."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"socket folder {folder} can't be made ({error.strerror}); set socket to a path of "
            "your own"
        ) from error
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise ConfigError(
            f"socket folder {folder} is not a folder of this user; remove it, or set socket to a "
            "path of your own"
        )
    if facts.st_mode & 0o077:
        folder.chmod(0o700)


def print_config(settings: Settings, config: Config, as_json: bool) -> None:
    """Every setting, the value in use and where it comes from; as TOML that can be used as a
    file."""
    in_use = flatten(config)
    rows = []
    for setting in SCHEMA:
        value = settings.values[setting.key]
        shown = setting.kind.show(in_use[setting.key])
        source = value.source + (" (auto)" if value.text == "auto" else "")
        rows.append((setting.key, value.text if setting.secret else shown, source))
    if as_json:
        print(json.dumps({key: {"value": value, "source": source} for key, value, source in rows}))
        return
    for key, text, source in rows:
        print(f"{f'{key} = {json.dumps(text)}':<60} # {source}")


def flatten(config: object, prefix: str = "") -> Mapping[str, object]:
    """The leaves of the tree by their dotted keys."""
    flat: dict[str, object] = {}
    assert is_dataclass(config), prefix
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            flat |= flatten(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = value
    return flat


def _serve(config: Config, notify_socket: str) -> int:
    from kvstore.daemon import Daemon

    def announce(lines: list[str]) -> None:
        try:
            print("\n".join(lines), flush=True)
        except OSError as error:
            logging.warning("nobody reads the start's lines: %s", error.strerror)
        _notify(notify_socket, b"READY=1")

    try:
        Daemon(config, __version__, announce).run()
    except InvariantError as error:
        logging.critical("stopped by a bug: %s", error, exc_info=error)
        print(f"kvstore serve: stopped by a bug in kvstore: {error}", file=sys.stderr, flush=True)
        os._exit(FAILURE)
    except ConfigError:
        raise
    except KVStoreError as error:
        print(f"kvstore serve: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILURE
    return OK


def _notify(address: str, message: bytes) -> None:
    """Tell a service supervisor that asked for it (systemd's protocol; @ is an abstract name)."""
    if not address:
        return
    name = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as supervisor:
        try:
            supervisor.sendto(message, name)
        except OSError as error:
            logging.warning("NOTIFY_SOCKET=%s can't be told: %s", address, error.strerror)

"""The commands that ask a running daemon: ``kvstore stats`` and ``kvstore clear``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from kvstore import report
from kvstore.admin import SERVICE
from kvstore.admin_reply import document
from kvstore.cli_status import FAILURE, NO_DAEMON, OK
from kvstore.config import Settings
from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.proto_gen import admin_pb2

CALL_DEADLINE_S = 10.0
CLEAR_DEADLINE_S = 60.0
CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1))
"""A daemon that knows many models with long names answers with more than gRPC's 4 MiB."""
NO_ANSWER = "Deadline Exceeded"
"""What gRPC itself says when a call's deadline has passed, other than what a daemon says."""
NAMES_SHOWN_MAX = 20

Reply = TypeVar("Reply", bound=Message)


class NoDaemonError(KVStoreError):
    """Nothing answers at the admin address."""


class AdminClient:
    """A connection to a daemon's admin service. Its calls raise NoDaemonError or KVStoreError."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> AdminClient:
        socket = self.address.removeprefix("unix:")
        try:
            missing = socket != self.address and not Path(socket).is_socket()
        except OSError as error:
            raise KVStoreError(
                f"{self.address}: {error.strerror}; run it as the user of that daemon"
            ) from error
        if missing:
            raise self._no_daemon()
        self._channel = grpc.insecure_channel(self.address, CHANNEL_OPTIONS)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._channel is not None:
            self._channel.close()

    def stats(self) -> report.Document:
        """The daemon's snapshot, as plain values."""
        request = admin_pb2.StatsRequest()
        return document(self._call("Stats", request, admin_pb2.StatsReply, CALL_DEADLINE_S))

    def clear(self, model: str, tenant: str) -> admin_pb2.ClearReply:
        """Forget the chunks of matching namespaces; empty matches all."""
        request = admin_pb2.ClearRequest(model=model, tenant=tenant)
        return self._call("Clear", request, admin_pb2.ClearReply, CLEAR_DEADLINE_S)

    def _call(self, name: str, request: Message, reply: type[Reply], deadline_s: float) -> Reply:
        assert self._channel is not None, "inside the with statement only"
        call = self._channel.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,
        )
        try:
            answer: Reply = call(request, timeout=deadline_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise self._no_daemon() from error
            if error.details() == NO_ANSWER:
                raise KVStoreError(
                    f"the daemon at {self.address} doesn't answer within {deadline_s:g} s; it is "
                    "stopped or very busy: look at its log"
                ) from error
            raise KVStoreError(f"the daemon at {self.address}: {error.details()}") from error
        return answer

    def _no_daemon(self) -> NoDaemonError:
        return NoDaemonError(
            f"no daemon answers at {self.address}; start one with `kvstore serve`, or say with "
            "--socket (KVSTORE_SOCKET) where it listens"
        )


def stats(settings: Settings, namespace: argparse.Namespace) -> int:
    """Show the daemon's statistics, once or every few seconds."""
    seconds = namespace.watch
    if seconds is not None and not 0.1 <= seconds <= 3600:
        raise ConfigError(f"--watch={seconds:g} is refused; valid: 0.1 to 3600 seconds")

    def show(client: AdminClient) -> int:
        if seconds is None:
            _print_stats(client.stats(), namespace.json)
            return OK
        return _watch(client, seconds, namespace.json)

    return _with_client(settings, "stats", show)


def clear(settings: Settings, namespace: argparse.Namespace) -> int:
    """Forget the chunks of a model, a tenant, or all: on this node, and in Redis for all nodes."""
    model, tenant = namespace.model or "", namespace.tenant or ""
    if not (model or tenant or namespace.all):
        raise ConfigError("name what to clear: --model NAME, --tenant NAME, or --all")
    if (model or tenant) and namespace.all:
        raise ConfigError("--all and --model or --tenant exclude one another; give one")

    def forget(client: AdminClient) -> int:
        figures = client.stats()
        shared = figures["redis"]["state"] != "off"
        unknown = _unknown(model, tenant, figures)
        if unknown and not figures["spaces_more"] and not shared:
            raise KVStoreError(unknown)
        if not (namespace.yes or namespace.json or _confirmed(model, tenant, shared)):
            print("nothing was cleared", file=sys.stderr)
            return FAILURE
        reply = client.clear(model, tenant)
        if unknown and not (reply.namespaces or reply.fleet.namespaces or reply.fleet.error):
            raise KVStoreError(unknown)
        return _tell_cleared(reply, namespace.json)

    return _with_client(settings, "clear", forget)


def _tell_cleared(reply: admin_pb2.ClearReply, as_json: bool) -> int:
    """Say what was cleared on this node and in the fleet; a fleet that wasn't is a failure."""
    fleet = reply.fleet if reply.HasField("fleet") else None
    failed = fleet is not None and fleet.error
    if as_json:
        print(json.dumps(document(reply) | {"fleet": document(fleet) if fleet else None}))
        return FAILURE if failed else OK
    here = (
        f"cleared {reply.chunks} chunks in {reply.namespaces} namespaces from host memory and NVMe"
    )
    if fleet is None:
        print(f"{here} of this node; other nodes keep theirs")
    elif failed:
        print(f"{here} of this node")
        print(
            f"kvstore clear: the fleet's chunks in Redis are NOT cleared: {fleet.error}; every "
            "node, this one included, still finds them there: clear again when Redis is up",
            file=sys.stderr,
        )
    else:
        print(
            f"{here} of this node, and {fleet.namespaces} namespaces from Redis for all nodes; "
            "what other nodes hold in their own host memory and NVMe they keep"
        )
    return FAILURE if failed else OK


def _unknown(model: str, tenant: str, figures: report.Document) -> str:
    """Why nothing that is listed can be meant, with the largest ones that are known; else
    empty."""
    spaces = figures["spaces"]
    models = [name for space in spaces for name in (space["model"], space["alias"]) if name]
    tenants = [space["tenant"] for space in spaces]
    for what, name, known in (("model", model, models), ("tenant", tenant, tenants)):
        if name and name not in known:
            names = list(dict.fromkeys(known))
            more = len(names) - NAMES_SHOWN_MAX + figures["spaces_more"]
            shown = ", ".join(sorted(names[:NAMES_SHOWN_MAX])) or "none"
            rest = f" and {more} more" if more > 0 else ""
            return f"--{what}={name!r} is not known here; known {what}s: {shown}{rest}"
    return ""


def _with_client(settings: Settings, name: str, use: Callable[[AdminClient], int]) -> int:
    try:
        with AdminClient(settings.admin_address()) as client:
            return use(client)
    except NoDaemonError as error:
        print(f"kvstore {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return NO_DAEMON


def _print_stats(snapshot: report.Document, as_json: bool) -> None:
    print(json.dumps(snapshot) if as_json else report.render(snapshot), flush=True)


def _watch(client: AdminClient, seconds: float, as_json: bool) -> int:
    """Print again and again; an interrupt ends it well."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    clear_screen = "\x1b[H\x1b[2J" if terminal and not as_json else ""
    try:
        while True:
            snapshot = client.stats()
            print(clear_screen, end="")
            _print_stats(snapshot, as_json)
            if not clear_screen and not as_json:
                print("----", flush=True)
            time.sleep(seconds)
    except KeyboardInterrupt:
        return OK


def _confirmed(model: str, tenant: str, shared: bool) -> bool:
    what = f"model {model}" if model else "every model"
    whose = f" of tenant {tenant}" if tenant else ""
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError("not confirmed, and there is no terminal to ask at; add --yes")
    where = "on this node, and in Redis for all nodes" if shared else "on this node"
    answer = input(f"Forget the chunks of {what}{whose} {where}? [y/N] ")
    return answer.strip().lower() in ("y", "yes")

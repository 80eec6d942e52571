"""AdminService: the daemon's administration over gRPC: statistics, clear, health and reflection.

It never touches the core: what it needs of it comes through Source, whose calls run on the loop's
thread and have a deadline. Nothing here evaluates anything; the service has two calls of its own.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from kvstore.admin_reflection import STREAMS_MAX, BoundedReflection
from kvstore.admin_reply import clear_reply, stats_reply
from kvstore.admin_snapshot import Rates, Source
from kvstore.core.errors import KVStoreError, TierUnavailableError
from kvstore.proto_gen import admin_pb2

SERVICE = "kvstore.admin.v1.Admin"
THREADS = 4 + STREAMS_MAX
CALLS_MAX = 64
"""Calls and streams at a time; beyond it they are refused rather than queued."""
STOP_GRACE_S, STOP_S = 0.5, 1.0

_log = logging.getLogger(__name__)


class AdminService:
    """The gRPC server at ``address`` (``unix:/path`` or a loopback ``host:port``)."""

    def __init__(self, address: str, source: Source) -> None:
        self.address = address
        self._source = source
        self._rates = Rates()
        self._health = health.HealthServicer()
        self._server: grpc.Server | None = None

    def open(self) -> None:
        """Listen. Raises TierUnavailableError where the address can't be had."""
        _check_free(self.address)
        server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix="admin"),
            options=[("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=CALLS_MAX,
        )
        server.add_generic_rpc_handlers((self._handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        streams: Any = BoundedReflection(names)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(streams, server)
        try:
            server.add_insecure_port(self.address)
        except RuntimeError as error:
            raise TierUnavailableError(
                f"admin.address={self.address} can't be had (in use or not allowed); choose another"
            ) from error
        if self.address.startswith("unix:"):
            os.chmod(self.address.removeprefix("unix:"), 0o600)
        self.sample(time.monotonic())
        server.start()
        self._server = server

    def sample(self, now_s: float) -> None:
        """Take a sample of throughput and health; the daemon calls it once a second."""
        self._rates.add(now_s, self._source.io())
        serving = self._source.state() == "ok"
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", SERVICE):
            self._health.set(name, status)

    def close(self) -> None:
        """Refuse new calls, let those that run end within STOP_GRACE_S, and stop; nothing that a
        caller does makes it take longer than STOP_S. Idempotent."""
        if self._server is not None:
            self._health.enter_graceful_shutdown()
            self._server.stop(STOP_GRACE_S).wait(STOP_S)
            self._server = None

    def _handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Stats": grpc.unary_unary_rpc_method_handler(
                    self._stats,
                    response_serializer=admin_pb2.StatsReply.SerializeToString,
                ),
                "Clear": grpc.unary_unary_rpc_method_handler(
                    self._clear,
                    response_serializer=admin_pb2.ClearReply.SerializeToString,
                ),
            },
        )

    def _stats(self, raw: bytes, context: grpc.ServicerContext) -> admin_pb2.StatsReply:
        try:
            admin_pb2.StatsRequest.FromString(raw)
            snapshot = self._source.snapshot(_deadline(context, 5.0))
        except (KVStoreError, DecodeError) as error:
            _refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, error)
            return admin_pb2.StatsReply()
        return stats_reply(snapshot, self._rates)

    def _clear(self, raw: bytes, context: grpc.ServicerContext) -> admin_pb2.ClearReply:
        try:
            request = admin_pb2.ClearRequest.FromString(raw)
            cleared = self._source.clear(
                request.model or None, request.tenant or None, _deadline(context, 30.0)
            )
        except (KVStoreError, DecodeError) as error:
            _refuse(context, grpc.StatusCode.ABORTED, error)
            return admin_pb2.ClearReply()
        _log.info(
            "cleared model=%.200r tenant=%.200r: %d chunks in %d namespaces",
            request.model, request.tenant, cleared.chunks, cleared.namespaces,
        )  # fmt: skip
        return clear_reply(cleared)


def _check_free(address: str) -> None:
    """Refuse a Unix path that a living service listens on, or that is no socket: gRPC would replace
    either. A dead socket is fine."""
    path = address.removeprefix("unix:")
    if path == address:
        return
    if not os.path.isdir(os.path.dirname(path)):
        raise TierUnavailableError(
            f"admin.address={address}: its folder doesn't exist; make it, or choose another address"
        )
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise TierUnavailableError(f"admin.address={address}: the path exists and isn't a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a listener that is stopped may have its queue full
        if probe.connect_ex(path) not in (errno.ECONNREFUSED, errno.ENOENT):
            raise TierUnavailableError(
                f"admin.address={address}: another daemon listens there; choose another address"
            )


def _deadline(context: grpc.ServicerContext, most_s: float) -> float:
    """Seconds that a call may wait for the loop: what its caller allows, and no more than
    most_s."""
    remaining = context.time_remaining()
    return most_s if remaining is None else min(most_s, max(0.0, remaining - 0.1))


def _refuse(context: grpc.ServicerContext, code: grpc.StatusCode, error: Exception) -> None:
    """Answer a call with a status. gRPC's own ways, an error of its deserializer or ``abort``,
    leave a traceback in a cycle each, which nothing collects here."""
    is_message = not isinstance(error, DecodeError)
    context.set_code(code if is_message else grpc.StatusCode.INVALID_ARGUMENT)
    context.set_details(str(error) if is_message else "the request is no message of this call")

"""How a connection becomes a session: what a client sends after HELLO, made anew for each try."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from kvstore.core.errors import LayoutMismatchError, ProtocolError
from kvstore.core.keys import KEY_BYTES
from kvstore.memory import CudaMemory, HostMemory
from kvstore.proto_gen import engine_pb2 as pb
from kvstore.wire import FRAME_BYTES_MAX
from kvstore.wire_messages import Registration, write_registration


@dataclass(frozen=True, slots=True)
class Join:
    """A REGISTER with its descriptor or an ATTACH, and the revision that the session must have
    before it is of use (empty: the engine's own)."""

    message: pb.ClientMessage
    descriptors: tuple[int, ...] = ()
    revision: str = ""


def check_engine(engine: pb.Engine, join: pb.ClientMessage) -> None:
    """Raise ProtocolError unless keys can be made of what the daemon says of a ready engine: for a
    worker, of chunks as it registered them."""
    tokens, own = engine.tokens_per_chunk, join.register.layout.tokens_per_chunk
    if len(engine.namespace) != KEY_BYTES or tokens < 1 or tokens != (own or tokens):
        raise ProtocolError(
            f"what it says of engine {engine.engine[:64]!r}: a namespace of "
            f"{len(engine.namespace)} bytes, {tokens} tokens a chunk (here {own or 'any'})"
        )


class Attaching:
    """Joins an engine as a scheduler. ``revision`` is what ``set_revision`` was given last."""

    def __init__(self, engine: str, credential: str) -> None:
        self.revision = ""
        self._engine = engine
        self._credential = credential

    def join(self) -> Join:
        """The next try."""
        message = pb.ClientMessage(
            kind=pb.ClientMessage.ATTACH, engine=self._engine, credential=self._credential
        )
        return Join(message, (), self.revision)

    def close(self) -> None:
        """Nothing is held."""


class Registering:
    """Joins an engine as a worker. Owns a duplicate of a host memory's descriptor, for as long as
    the session may have to register again."""

    def __init__(
        self, registration: Registration, memory: HostMemory | CudaMemory, credential: str
    ) -> None:
        self.revision = ""
        self._registration = registration
        self._memory = memory
        self._credential = credential
        self._fd: int | None = None

    def open(self) -> None:
        """Check what can be checked here and keep the descriptor; raises LayoutMismatchError."""
        self._registration.validate()
        try:
            size = self._message().ByteSize()
        except ValueError as error:
            raise LayoutMismatchError(f"layout: a number is out of range: {error}") from error
        if size > FRAME_BYTES_MAX:
            raise LayoutMismatchError(
                f"layout: its description has {size} bytes; valid are up to {FRAME_BYTES_MAX}"
            )
        if isinstance(self._memory, HostMemory):
            try:
                self._fd = os.dup(self._memory.fd)
            except OSError as error:
                raise LayoutMismatchError(
                    f"memory: descriptor {self._memory.fd}: {error.strerror}"
                ) from error

    def join(self) -> Join:
        """The next try, under the revision of now."""
        fd = self._fd  # once: another thread may close it
        return Join(self._message(), () if fd is None else (fd,))

    def close(self) -> None:
        """Let the descriptor go. Idempotent, from several threads at a time too."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _message(self) -> pb.ClientMessage:
        registration = self._registration
        if self.revision:
            namespace = replace(registration.namespace, revision=self.revision)
            registration = replace(registration, namespace=namespace)
        message = write_registration(registration)
        if isinstance(self._memory, HostMemory):
            message.memory.kind = pb.Memory.HOST
        else:
            message.memory.kind = pb.Memory.CUDA
            message.memory.device_uuid = self._memory.device_uuid
            message.memory.ipc_handle = self._memory.ipc_handle
            message.memory.ipc_offset = self._memory.offset_bytes
        return pb.ClientMessage(
            kind=pb.ClientMessage.REGISTER, register=message, credential=self._credential
        )

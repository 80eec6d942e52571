"""Errors of use of a client's sessions: told where they are made, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kvstore
from kvstore import (
    HostMemory,
    KVStoreError,
    Layout,
    LayoutMismatchError,
    Shard,
)
from kvstore.core.errors import CapacityError, ConfigError, ProtocolError
from kvstore.core.messages import (
    Cause,
    Refused,
    Register,
    Reply,
    Retrieve,
    Store,
)
from tests.client_rig import BLOCKS, Engine, keys_of
from tests.link_rig import (
    MEMORY_BYTES,
    SPACE,
    Rig,
    eventually,
    layout,
    running_rig,
)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A running server."""
    with running_rig() as running:
        yield running


@pytest.fixture
def engine(rig: Rig) -> Iterator[Engine]:
    """An engine at the running server."""
    with Engine(rig.path) as engine:
        yield engine


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ({}, r"groups \[\]; the layout's are \['full'\]"),
        ({"full": [0, 1, 2, 3], "other": []}, "other"),
        ({"full": [0, 1, 2]}, "has 3 block IDs; 1 chunks of 4 blocks need 4"),
        ({"full": [0, 1, 2, -1]}, "group 'full'"),
        ({"full": [0, 1, 2, 1 << 32]}, "group 'full'"),
        ({"full": [0, 1, 2, "x"]}, "group 'full'"),
        ({"full": b"0123"}, "is bytes; pass integers"),
    ],
)
def test_errors_of_use_are_raised_at_the_call(
    rig: Rig, engine: Engine, blocks: dict[str, list[int]], words: str
) -> None:
    """A wrong shape is the caller's bug, and is told where it is made; nothing is sent."""
    for transfer in (engine.worker.store, engine.worker.retrieve):
        with pytest.raises(LayoutMismatchError, match=words) as caught:
            transfer("r", keys_of(1), blocks)
        assert "\n" not in str(caught.value)
    assert rig.core.requests(Store) == rig.core.requests(Retrieve) == []


def test_more_errors_of_use(engine: Engine) -> None:
    """Names that the wire doesn't take, keys of another chunk size, keys from the middle."""
    with pytest.raises(KVStoreError, match="request"):
        engine.scheduler.lookup("", keys_of(1))
    with pytest.raises(KVStoreError, match="request"):
        engine.scheduler.release("r" * 2000)
    with pytest.raises(KVStoreError, match="keys start at chunk 1"):
        engine.scheduler.lookup("r", keys_of(3)[1:])
    with pytest.raises(KVStoreError, match="tokens_per_chunk=8; the session's is 16"):
        engine.worker.store("r", kvstore.ChunkKeys(b"k" * 32, 8, 8), BLOCKS)
    with pytest.raises(KVStoreError, match="engine_id"):
        engine.client.attach("")


def test_a_layout_that_does_not_fit_is_refused_before_the_daemon_is_asked(
    rig: Rig, engine: Engine
) -> None:
    """What can be checked in the engine's process is."""
    for shape, shard, words in (
        (layout(blocks=33), Shard(), "but the memory has"),
        (layout(), Shard(nodes=2), "one node only"),
        (Layout("float16", 3, layout().groups), Shard(), "tokens_per_chunk=3"),
    ):
        with pytest.raises(LayoutMismatchError, match=words):
            engine.client.register("e1", SPACE, shape, engine.memory.describe(), shard)
    with pytest.raises(LayoutMismatchError, match="descriptor -1"):
        engine.client.register("e1", SPACE, layout(), HostMemory(-1, MEMORY_BYTES), Shard())
    assert rig.core.events == []


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (Cause.LAYOUT, LayoutMismatchError),
        (Cause.LIMIT, CapacityError),
        (Cause.PROTOCOL, ProtocolError),
        (Cause.SETTING, ConfigError),
        (Cause.OTHER, KVStoreError),
    ],
)
def test_the_daemons_refusal_is_raised_by_register(
    rig: Rig, engine: Engine, cause: Cause, kind: type[KVStoreError]
) -> None:
    """A layout that other ranks don't share is an error of use, a limit one of the moment: the
    daemon says which; nothing goes on in the background."""
    refused = Refused("differs", cause)
    rig.core.answers[Register] = lambda event: [Reply(event.session, event.id, refused)]
    with pytest.raises(KVStoreError, match="differs") as caught:
        engine.client.register("e1", SPACE, layout(), engine.memory.describe(), Shard())
    assert type(caught.value) is kind
    eventually(lambda: rig.server.stats().sessions == ())
    assert len(rig.core.requests(Register)) == 1

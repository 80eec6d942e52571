"""RedisTier on a real server: what it keeps, what it lets go, and how it says so."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.codecs.base import pack, unpack
from kvstore.core.errors import CapacityError, TierUnavailableError
from kvstore.core.remote_messages import RemoteClear, RemoteEnter
from kvstore.testing import pattern, sample_header
from kvstore.testing.remote_tiers import epoch_of, place, probe_of
from tests.redis_rig import (
    Server,
    standalone,
    wait_until,
)
from tests.redis_tiers import name_of, opened, read, up, write, write_blindly

MODEL = "org/model"


@pytest.fixture
def server(private_folder: Path) -> Iterator[Server]:
    with standalone(private_folder / "r") as made:
        yield made


def test_values_expire(server: Server) -> None:
    """Every value of ours has the deployment's TTL: pieces, too."""
    header = sample_header(1, 20_000)
    with up(server.url, ttl_s=900.0, split_bytes=4096) as tier:
        epoch = write(tier, header)
        name = name_of(header, epoch)
        pieces = server.names(name.decode() + ":*")
        assert len(pieces) == 5
        for one in (name, *pieces):
            assert 800_000 < server.run("PTTL", one) <= 900_000
        assert tier.stats().splits == 1


def test_codecs_of_all_nodes_are_read(server: Server) -> None:
    """Field case 75: what one node packs the others read, in pieces too; compressible bytes take
    less space, and the statistics show it; others are stored as they are."""
    smooth = np.repeat(np.arange(100, dtype=np.uint16), 1000).view(np.uint8)
    header = sample_header(1, smooth.nbytes)
    epochs = set()
    for name in ("identity", "lz4", "zstd"):
        with up(server.url, codec=name, split_bytes=4096) as tier, up(server.url) as plain:
            epochs.add(epoch_of(tier, header))
            tier.write(place(min(epochs)), header, smooth)
            np.testing.assert_array_equal(read(plain, header, min(epochs)), smooth)
            packed = tier.stats().stored_bytes < smooth.nbytes // 2
            assert packed == (name != "identity")
            write(tier, sample_header(2, 9000))
            np.testing.assert_array_equal(
                read(plain, sample_header(2, 9000), min(epochs)), pattern(2, 9000)
            )
    assert len(epochs) == 1


def test_a_codec_that_is_missing_here_costs_nobody_the_chunk(server: Server) -> None:
    """Another node packed with a codec of its own: a miss here, and the value stays for those who
    can read it."""
    header = sample_header(1, 9000)
    with up(server.url) as tier:
        epoch = write(tier, header)
        name = name_of(header, epoch)
        found, payload = unpack(server.run("GET", name)[:4096])
        head = pack(found, replace(payload, codec_id=40_000))
        server.run("SETRANGE", name, 0, head)
        assert read(tier, header, epoch) is None
        assert tier.probe(probe_of(header)).found == (b"\1",)


def test_a_lost_piece_is_a_miss_and_heals(server: Server) -> None:
    """The server evicted a piece: the rest of the chunk goes, the next writer makes it whole."""
    header = sample_header(1, 20_000)
    with up(server.url, split_bytes=4096) as tier:
        epoch = write(tier, header)
        name = name_of(header, epoch)
        server.run("DEL", name + b":3")
        assert read(tier, header, epoch) is None
        assert tier.probe(probe_of(header)).found == (b"\0",)
        write(tier, header)
        np.testing.assert_array_equal(read(tier, header, epoch), pattern(1, 20_000))


def test_pieces_of_another_writing_are_a_miss(server: Server) -> None:
    """Two chunks' pieces mixed: the checksum over the whole says so."""
    a, b = sample_header(1, 20_000), sample_header(2, 20_000)
    with up(server.url, split_bytes=4096) as tier:
        epoch = write(tier, a)
        write(tier, b)
        server.run("RENAME", name_of(b, epoch) + b":2", name_of(a, epoch) + b":2")
        assert read(tier, a, epoch) is None


def test_damaged_values_are_misses(server: Server) -> None:
    """A bit flipped anywhere, a value cut or grown, one of another type: never wrong bytes, and
    the next write heals it."""
    header = sample_header(1, 9000)
    chooser = random.Random(5)
    with up(server.url) as tier:
        epoch = write(tier, header)
        name = name_of(header, epoch)
        whole = server.run("GET", name)
        flips = [chooser.randrange(len(whole)) for _ in range(12)]
        damaged = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in flips]
        for value in (*damaged, whole[:-1], whole[:4096], whole[:100], whole + b"x", b""):
            server.run("SET", name, value)
            assert read(tier, header, epoch) is None
            assert server.run("EXISTS", name) == 0
        server.run("LPUSH", name, "a list")
        assert read(tier, header, epoch) is None
        write(tier, header)
        np.testing.assert_array_equal(read(tier, header, epoch), pattern(1, 9000))


def test_half_of_it_evicted_at_random(private_folder: Path) -> None:
    """Field case 69: maxmemory with random eviction. Each read is a hit with the right bytes or a
    miss, whatever left, epochs and pieces included; and writes go on."""
    options = {"maxmemory": "24mb", "maxmemory_policy": "allkeys-random"}
    with standalone(private_folder / "r", **options) as server, up(
        server.url, split_bytes=128 << 10
    ) as tier:  # fmt: skip
        headers = [sample_header(n, 200_000) for n in range(200)]
        for header in headers:
            write(tier, header)
        hits = 0
        for header in headers:
            epoch = epoch_of(tier, header)
            out = read(tier, header, epoch)
            if out is not None:
                np.testing.assert_array_equal(out, pattern(header.sequence, 200_000))
                hits += 1
        assert 0 <= hits < 200
        assert server.info("stats")["evicted_keys"] > 0
        write(tier, headers[0])


def test_a_full_server_is_a_capacity_error(private_folder: Path) -> None:
    """maxmemory with noeviction: no space, reads go on, the breaker stays closed."""
    options = {"maxmemory": "8mb", "maxmemory_policy": "noeviction"}
    with standalone(private_folder / "r", **options) as server, up(server.url) as tier:
        first = sample_header(0, 1 << 20)
        epoch = write(tier, first)

        def fill() -> None:
            for n in range(1, 20):
                write(tier, sample_header(n, 1 << 20))

        with pytest.raises(CapacityError, match="full"):
            fill()
        np.testing.assert_array_equal(read(tier, first, epoch), pattern(0, 1 << 20))
        assert tier.stats().state == "up"


def test_an_epoch_that_was_lost_never_falls_back(server: Server) -> None:
    """The server evicted the epoch's key after a clear: what was cleared must not come back."""
    header = sample_header(1, 5000)
    with up(server.url) as tier:
        first = write(tier, header)
        tier.enter(RemoteEnter(header.tenant, header.namespace, MODEL, ""))
        assert tier.clear(RemoteClear(1, None, MODEL)).error == ""
        second = epoch_of(tier, header)
        server.run("DEL", *server.names("kvstore:epoch:*"))
        with up(server.url) as fresh:
            third = epoch_of(fresh, header)
            assert first < second < third
            assert epoch_of(tier, header) == third


def test_the_registry_comes_back(server: Server) -> None:
    """The server lost it: this node's namespaces are entered again by the tier's own thread."""
    with up(server.url) as tier:
        tier.enter(RemoteEnter("t", bytes(32), MODEL, ""))
        server.run("DEL", "kvstore:spaces")
        wait_until(lambda: server.run("HLEN", "kvstore:spaces") == 1, "it's entered again")


def test_a_clear_frees_the_memory(server: Server) -> None:
    """The chunks of former epochs are deleted, those of others stay."""
    gone, kept = sample_header(1, 5000), replace(sample_header(2, 5000), tenant="other:tenant")
    with up(server.url, split_bytes=4096) as tier:
        for header, model in ((gone, MODEL), (kept, "kept")):
            tier.enter(RemoteEnter(header.tenant, header.namespace, model, ""))
        epoch = write(tier, gone)
        kept_epoch = write(tier, kept)
        assert tier.clear(RemoteClear(1, gone.tenant, MODEL)).namespaces == 1
        wait_until(lambda: not server.names(f"kvstore:tenant:*:{epoch}:*"), "they are deleted")
        np.testing.assert_array_equal(read(tier, kept, kept_epoch), pattern(2, 5000))


def test_a_write_before_its_entry_leaves_the_names_alone(server: Server) -> None:
    """A write may come before this node's own entry, and must be found by every clear. Where the
    namespace was entered already, by a node that knows its model, that stays: a clear of another
    model isn't one of this."""
    header = sample_header(1, 5000)
    with up(server.url) as a, up(server.url) as b:
        write(a, header)
        assert a.clear(RemoteClear(1, None, "another")).namespaces == 1, "nobody knows its model"
        b.enter(RemoteEnter(header.tenant, header.namespace, MODEL, ""))
        with up(server.url) as c:
            write(c, header)
            assert c.clear(RemoteClear(2, None, MODEL)).namespaces == 1
        assert b.clear(RemoteClear(3, None, "another")).namespaces == 0
        assert b.clear(RemoteClear(4, None, MODEL)).namespaces == 1


def test_a_namespace_has_a_limit(server: Server) -> None:
    """Beyond it the oldest chunks leave, tails before heads, from both nodes' writes; another
    namespace has its own."""
    limit = 6 * (4096 + 5000)
    headers = [replace(sample_header(n, 5000), depth=n) for n in range(10)]
    other = replace(sample_header(30, 5000), namespace=bytes(32))
    with (
        up(server.url, namespace_bytes=limit) as a,
        up(server.url, namespace_bytes=limit, split_bytes=4096) as b,
    ):
        epoch = write(a, headers[0])
        for number, header in enumerate(headers[1:]):
            write((a, b)[number % 2], header)
        write(a, other)
        there = a.probe(probe_of(*headers)).found[0]
        assert there == bytes([1] * 6 + [0] * 4)
        assert a.stats().evicted + b.stats().evicted == 4
        assert not server.names(name_of(headers[9], epoch).decode() + "*")
        assert a.probe(probe_of(other)).found == (b"\1",)
        write(a, headers[0])
        assert a.probe(probe_of(*headers)).found[0] == there


def test_a_restarted_server_is_used_again(server: Server) -> None:
    """Field case 54: the sockets of the former process are never reused, no write succeeds without
    an answer, and the tier is up again by itself."""
    header = sample_header(1, 5000)
    with opened(server.url) as ours:
        ours.wait(True)
        write(ours.tier, header)
        server.kill()
        with pytest.raises(TierUnavailableError):
            write_blindly(ours.tier, header)
        ours.wait(False)
        assert ours.tier.stats().state.startswith("down: ")
        server.start()
        ours.wait(True)
        epoch = write(ours.tier, header)
        np.testing.assert_array_equal(read(ours.tier, header, epoch), pattern(1, 5000))
        assert ours.told == [True, False, True]


def test_a_server_that_restarted_unseen(server: Server) -> None:
    """Idle connections died between two operations: the next operation opens another one."""
    header = sample_header(1, 5000)
    with up(server.url) as tier:
        write(tier, header)
        server.run("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        epoch = write(tier, header)
        np.testing.assert_array_equal(read(tier, header, epoch), pattern(1, 5000))
        assert tier.stats().errors == 0


def test_the_breaker_costs_nothing_while_it_is_open(server: Server) -> None:
    """Field case 77: refused connections open it after three failures; from then on 1,000 probes
    reach nobody and are answered by a flag."""
    with opened(server.url) as ours:
        ours.wait(True)
        server.kill()
        ours.wait(False)
        before = ours.tier.stats()
        errors = {ours.tier.probe(probe_of(sample_header(1, 1))).error for _ in range(1000)}
        assert all("is down" in error for error in errors)
        assert (before.breaker_openings, before.connections) == (1, 0)


def test_a_small_pool_serves_many(server: Server) -> None:
    """Field case 72: two connections, 100 readers at once: all have their chunk, none an error,
    and the waits are counted."""
    header = sample_header(1, 200_000)
    with up(server.url, connections=2) as tier:
        epoch = write(tier, header)
        results: list[np.ndarray | None] = []
        begin = threading.Barrier(100)

        def one() -> None:
            begin.wait()
            results.append(read(tier, header, epoch))

        threads = [threading.Thread(target=one) for _ in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 100
        assert all(out is not None for out in results)
        stats = tier.stats()
        assert stats.connections <= 2
        assert stats.connection_waits > 0
        assert stats.connection_wait_s > 0


def test_a_wait_for_a_connection_has_a_deadline(server: Server) -> None:
    """Field case 72: one connection, held by a server that stopped: who waits for it is refused in
    time; that isn't held against the server."""
    header = sample_header(1, 100)
    with up(server.url, connections=1, operation_timeout_s=1.0) as tier:
        epoch = write(tier, header)
        server.stop()
        errors: list[str] = []

        def one() -> None:
            try:
                read(tier, header, epoch)
            except TierUnavailableError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=one) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.go_on()
        assert len(errors) == 2
        assert all("in time" in error for error in errors)


def test_close_ends_what_runs(server: Server) -> None:
    """A stop of the daemon never waits for a server that doesn't answer."""
    header = sample_header(1, 100)
    with up(server.url, operation_timeout_s=600.0) as tier:
        epoch = write(tier, header)
        server.stop()
        ended = threading.Event()

        def one() -> None:
            with pytest.raises(TierUnavailableError):
                read(tier, header, epoch)
            ended.set()

        thread = threading.Thread(target=one)
        thread.start()
        wait_until(lambda: tier.stats().connections, "it reads")
        tier.close()
        thread.join()
        assert ended.is_set()
        server.go_on()


def test_open_waits_for_nobody() -> None:
    """Field case 45: an address that answers nothing: open returns, probes are errors."""
    with opened("redis://203.0.113.1:6379", connect_timeout_s=30.0) as ours:
        assert ours.tier.stats().state == "connecting"
        assert ours.tier.probe(probe_of(sample_header(1, 1))).error
        assert ours.told == []

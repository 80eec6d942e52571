"""A batch of small commands: one pipelined round trip to each server that holds a name of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvstore.core.errors import KVStoreError, TierUnavailableError
from kvstore.tiers.redis_errors import of_reply
from kvstore.tiers.redis_lane import Lane, Reply, ReplyError, pack
from kvstore.tiers.redis_node import RedisNode
from kvstore.tiers.redis_servers import REDIRECTS_MAX, RedisServers

Answer: TypeAlias = "Reply | KVStoreError"
"""A reply, or why there is none: the holder is down, or refused the command."""

Question: TypeAlias = tuple[bytes, bytes]
"""A name, and a packed command about it. Probes have hundreds."""

_ASKING = pack((b"ASKING",))


@dataclass(slots=True)
class _Share:
    """What one server is asked: the numbers of its questions."""

    node: RedisNode
    asking: bool
    numbers: list[int]
    lane: Lane | None = None


def ask_all(servers: RedisServers, questions: Sequence[Question]) -> list[Answer]:
    """All answers, in order. Servers work at the same time; only what a moving slot turned away is
    asked again. A server that fails costs its own answers, no others."""
    answers: list[Answer] = [None] * len(questions)
    shares = _by_holder(servers, questions, answers)
    for _ in range(REDIRECTS_MAX):
        # In one order everywhere, so that no two batches wait for each other's lanes.
        for share in sorted(shares, key=lambda share: share.node.address):
            _send(share, questions, answers)
        moved: dict[tuple[RedisNode, bool], _Share] = {}
        for share in shares:
            for number in _receive(share, servers, answers):
                error = answers[number]
                target = servers.redirect(error) if isinstance(error, ReplyError) else None
                if target is not None:
                    moved.setdefault(target, _Share(*target, [])).numbers.append(number)
        shares = list(moved.values())
        if not shares:
            break
    for share in shares:
        _fail(share, answers, TierUnavailableError("redis: no end of redirections"))
    return [of_reply(a, "a server") if isinstance(a, ReplyError) else a for a in answers]


def _by_holder(
    servers: RedisServers, questions: Sequence[Question], answers: list[Answer]
) -> list[_Share]:
    if servers.only is not None:
        return [_Share(servers.only, False, list(range(len(questions))))]
    shares: dict[RedisNode, _Share] = {}
    for number, (name, _) in enumerate(questions):
        try:
            node = servers.holder(name)
        except TierUnavailableError as error:
            answers[number] = error.with_traceback(None)  # whose frames hold the answers
            continue
        share = shares.get(node)
        if share is None:
            share = shares[node] = _Share(node, False, [])
        share.numbers.append(number)
    return list(shares.values())


def _send(share: _Share, questions: Sequence[Question], answers: list[Answer]) -> None:
    before = _ASKING if share.asking else b""
    data = b"".join(before + questions[number][1] for number in share.numbers)
    try:
        share.lane = share.node.take()
    except TierUnavailableError as error:
        _fail(share, answers, error)
        return
    try:
        share.lane.send(data)
    except OSError as error:
        _fail(share, answers, share.node.broke(share.lane, error))


def _receive(share: _Share, servers: RedisServers, answers: list[Answer]) -> list[int]:
    """Take a share's replies; the numbers of those that are errors."""
    if share.lane is None:
        return []
    step = 2 if share.asking else 1
    try:
        replies = share.lane.replies(len(share.numbers) * step)[step - 1 :: step]
    except OSError as error:
        _fail(share, answers, share.node.broke(share.lane, error))
        return []
    wrong, errors = [], []
    for number, reply in zip(share.numbers, replies, strict=True):
        answers[number] = reply
        if isinstance(reply, ReplyError):
            wrong.append(number)
            errors.append(reply)
    share.node.done(share.lane, errors)
    servers.note(errors)
    return wrong


def _fail(share: _Share, answers: list[Answer], error: TierUnavailableError) -> None:
    """The error is the answer; without its trace, whose frames hold the answers in turn."""
    share.lane = None
    error.__traceback__ = None
    for number in share.numbers:
        answers[number] = error

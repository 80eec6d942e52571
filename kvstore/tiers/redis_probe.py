"""What a Probe asks the servers, and what their answers mean."""

from __future__ import annotations

from kvstore.core.errors import KVStoreError, TierUnavailableError
from kvstore.core.keys import KEY_BYTES
from kvstore.core.remote_messages import Probe, Probed
from kvstore.tiers.redis_batch import Answer, Question, ask_all
from kvstore.tiers.redis_epochs import RedisEpochs
from kvstore.tiers.redis_names import RedisNames
from kvstore.tiers.redis_servers import RedisServers

_HEX_BYTES = 2 * KEY_BYTES


class RedisProber:
    """Answers Probes: one pipelined round trip to each server, which asks for the namespace's
    epoch, too; a second one where that has changed meanwhile. Thread-safe."""

    def __init__(self, servers: RedisServers, names: RedisNames, epochs: RedisEpochs) -> None:
        self._servers = servers
        self._names = names
        self._epochs = epochs

    def run(self, probe: Probe) -> Probed:
        """Which keys are there. Names whose server is down count as absent. Raises
        TierUnavailableError where no server answered."""
        space = (probe.tenant, probe.namespace)
        epoch = self._epochs.known(space)
        if epoch is None:
            epoch = self._epochs.read(space)
        for _ in range(2):
            copies = self._epochs.questions(space)
            answers = ask_all(self._servers, copies + self._questions(probe, epoch))
            seen = self._epochs.take(space, answers[: len(copies)])
            if seen is None:
                seen = self._epochs.read(space)
            if seen == epoch:
                return Probed(probe.id, epoch, _found(probe, answers[len(copies) :]))
            epoch = seen
        raise TierUnavailableError("redis: the epoch changes while it is probed")

    def _questions(self, probe: Probe, epoch: int) -> list[Question]:
        """By part, then shard, then key."""
        digits = probe.keys.hex().encode()
        space = (probe.tenant, probe.namespace)
        questions = []
        for part in probe.parts:
            for shard in probe.shards:
                start, end = self._names.around_key(space, epoch, shard, part)
                before = b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n" % (len(start) + _HEX_BYTES + len(end))
                for at in range(0, len(digits), _HEX_BYTES):
                    name = b"%s%s%s" % (start, digits[at : at + _HEX_BYTES], end)
                    questions.append((name, b"%s%s\r\n" % (before, name)))
        return questions


def _found(probe: Probe, answers: list[Answer]) -> tuple[bytes, ...]:
    errors = [answer for answer in answers if isinstance(answer, KVStoreError)]
    if errors and len(errors) == len(answers):
        raise TierUnavailableError(str(errors[0])) from errors[0]
    count = len(probe.keys) // KEY_BYTES
    there = bytes(answer == 1 for answer in answers)
    found = []
    for part in range(len(probe.parts)):
        rows = [
            there[at * count : (at + 1) * count]
            for at in range(part * len(probe.shards), (part + 1) * len(probe.shards))
        ]
        found.append(bytes(map(min, zip(*rows, strict=True))) if len(rows) > 1 else rows[0])
    return tuple(found)

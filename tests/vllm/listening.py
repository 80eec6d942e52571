"""tests/vllm/engine.py with a listener to vLLM's KV events, over ZMQ as a router has one.

Operation ``events``: step until nothing is left, then wait until ``count`` events of an external
medium have come, or ``timeout_s`` is over -> events of all mediums since the last call
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

from tests.vllm.engine import Engine, serve


class ListeningEngine(Engine):
    """An engine that publishes KV events, and their subscriber."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import zmq
        from vllm.config import KVEventsConfig

        endpoint = f"ipc://{tempfile.mkdtemp(prefix='kve-')}/events"
        self.listener = zmq.Context.instance().socket(zmq.SUB)
        self.listener.connect(endpoint)
        self.listener.setsockopt(zmq.SUBSCRIBE, b"")
        arguments["engine"]["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint
        )
        super().__init__(arguments)

    def events(self, line: dict[str, Any]) -> dict[str, Any]:
        """See the module."""
        until_s = time.monotonic() + line.get("timeout_s", 60.0)
        found: list[dict[str, Any]] = []
        while time.monotonic() < until_s:
            self.engine.step()
            found += self._heard()
            if sum(event["medium"] not in (None, "GPU") for event in found) >= line["count"]:
                break
            time.sleep(0.01)
        return {"events": found}

    def _heard(self) -> list[dict[str, Any]]:
        import msgspec
        import zmq
        from vllm.distributed.kv_events import KVEventBatch

        found = []
        while self.listener.poll(0):
            *_, payload = self.listener.recv_multipart(zmq.NOBLOCK)
            for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
                plain = {"medium": None} | {
                    name: getattr(event, name) for name in event.__struct_fields__
                }
                for name in ("block_hashes", "parent_block_hash"):
                    plain[name] = _text(plain.get(name))
                found.append({"kind": type(event).__name__} | plain)
        return found


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return [_text(each) for each in value]
    return value.hex() if isinstance(value, bytes) else value


if __name__ == "__main__":
    serve(ListeningEngine)

"""connect: registers an engine's KV memory with the daemon, under the namespace of its model."""

from __future__ import annotations

from itertools import count

from kvstore import Client, Namespace, Shard
from kvstore.core.layout import Layout
from kvstore.memory import OwnedHostMemory
from kvstore_transformers.engine import Connect
from kvstore_transformers.link import Session
from kvstore_transformers.model import CausalModel


def namespace_of(model: CausalModel) -> Namespace:
    """Whose KV it is: the weights' digest, effective configuration, and the format, which names
    engine, order inside a block (tokens, heads, dimension) and element type. Where the model's
    files lie is no part of it, so that nodes and folders share; people see the folder's name."""
    dtype = str(model.weights.dtype).removeprefix("torch.")
    return Namespace(
        model=model.revision,
        revision=model.revision,
        format=f"transformers-cpu/NHD/{dtype}",
        config=model.spec.config_digest(),
        alias=model.name.rstrip("/").rpartition("/")[2],
    )


def connect(client: Client, model: CausalModel, engine_id: str) -> Connect:
    """What ``Engine`` calls to register its memory; a second registration (see engine.py) is
    another engine, ``engine_id``.2. The client stays the caller's."""
    numbers = count(1)

    def register(memory: OwnedHostMemory, layout: Layout) -> Session:
        number = next(numbers)
        return client.register(
            engine_id=engine_id if number == 1 else f"{engine_id}.{number}",
            namespace=namespace_of(model),
            layout=layout,
            memory=memory.describe(),
            shard=Shard(),
        )

    return register

"""Nodes for the tests of faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.node import Gate, Node
from tests.small_engine import SmallEngine

StartNode = Callable[..., Node]
StartEngine = Callable[..., SmallEngine]


@pytest.fixture
def start_node(private_folder: Path) -> Iterator[StartNode]:
    """Starts a node: ``start_node(host_chunks, nvme_chunks)``; it ends with the test."""
    with ExitStack() as stack:
        yield lambda host, nvme=0: stack.enter_context(Node(private_folder, host, nvme))


@pytest.fixture
def hold(start_node: StartNode) -> Iterator[Callable[[], Gate]]:
    """Makes gates, which open before the node ends."""
    gates: list[Gate] = []

    def make() -> Gate:
        gates.append(Gate())
        return gates[-1]

    yield make
    for gate in gates:
        gate.open()


@pytest.fixture
def start_engine(start_node: StartNode) -> Iterator[StartEngine]:
    """Starts engines: ``start_engine(node, chunks, name)``; they leave before the node does."""
    with ExitStack() as stack:
        yield lambda node, chunks, name="e1": stack.enter_context(
            SmallEngine(node.path, chunks, name=name)
        )

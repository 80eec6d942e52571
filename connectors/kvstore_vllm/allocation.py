"""SharedAllocation: gives vLLM KV memory that the daemon can map.

vLLM allocates all of its KV in one ``torch.zeros(size, int8)`` inside the context that the
connector names. Inside this context that call is answered with a tensor over a memfd that is
sealed against shrinking; every other call goes through. Where the memory can't be had the engine
gets ordinary memory, and ``reason`` says why it can't be registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvstore import CapacityError, OwnedHostMemory, create_host_memory


class SharedAllocation(TorchFunctionMode):
    """A context; ``memory`` owns the bytes once they are allocated, ``base`` is their address."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.memory: OwnedHostMemory | None = None
        self.base = 0
        self.reason = "vLLM hasn't allocated its KV cache in the connector's context"
        self._name = name

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer the allocation of the KV cache; leave everything else alone."""
        kwargs = kwargs or {}
        if func is torch.zeros and self.memory is None and _is_kv_cache(args, kwargs):
            device = torch.device(kwargs.get("device") or "cpu")
            if device.type != "cpu":
                self.reason = f"the KV cache is on device {device}; this version serves CPUs only"
            else:
                found = self._allocate(int(args[0]))
                if found is not None:
                    return found
        return func(*args, **kwargs)

    def _allocate(self, nbytes: int) -> torch.Tensor | None:
        try:
            self.memory = create_host_memory(self._name, nbytes)
        except CapacityError as error:
            self.reason = str(error)
            return None
        tensor = torch.frombuffer(self.memory.buffer, dtype=torch.int8)
        self.base = tensor.data_ptr()
        self.reason = ""
        return tensor


def _is_kv_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args) == 1 and isinstance(args[0], int) and kwargs.get("dtype") is torch.int8

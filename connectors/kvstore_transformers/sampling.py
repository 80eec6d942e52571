"""Sampling: how the next token is chosen from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore_transformers.errors import RequestError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Greedy at ``temperature`` 0, else a draw from the smallest set of likely tokens whose
    probabilities reach ``top_p``; the same ``seed`` draws the same tokens."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def validate(self) -> None:
        """Raise RequestError for values without a meaning."""
        if not 0.0 <= self.temperature < float("inf"):
            raise RequestError(f"sampling: temperature={self.temperature}; valid is 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"sampling: top_p={self.top_p}; valid is above 0 and up to 1")

    def generator(self) -> torch.Generator:
        """A fresh source of draws for one generation."""
        return torch.Generator().manual_seed(self.seed)

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """The next token for float32 logits [vocabulary]."""
        if self.temperature == 0.0:
            return int(logits.argmax())
        ordered, tokens = (logits / self.temperature).softmax(-1).sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        likely = ordered.masked_fill(before >= self.top_p, 0.0)
        return int(tokens[torch.multinomial(likely, 1, generator=generator)])


GREEDY = Sampling()

"""Drafts: what speculative decoding means for reuse.

A drafter's own KV lies in the same blocks as the target's. It is stored and loaded with it, as so
many layers more; otherwise a loaded prefix would leave the drafter with whatever lay in those
blocks before. No draft changes the text, since the target verifies each token; wrong KV of a
drafter only makes its guesses bad.

EAGLE and MTP heads read the *next* token at each position, so the last position of a stored prefix
was drafted for another continuation, perhaps. Like vLLM, which drops the last block of a hit in its
own cache, the connector leaves that block to be computed: it is offered as not computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig

from kvstore import LayoutMismatchError

METHODS = ("eagle", "eagle3", "mtp", "draft_model")
"""Drafters with KV of their own whose layers are like the target's: causal, one KV a token."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """``keeps_kv``: a drafter has KV of its own. ``reads_ahead``: its KV depends on the next token
    too."""

    keeps_kv: bool = False
    reads_ahead: bool = False


def drafting(config: VllmConfig) -> Drafting:
    """What an engine's speculative decoding means; raises LayoutMismatchError where its drafter's
    KV can't be kept."""
    speculative = config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return Drafting()
    if speculative.method not in METHODS:
        raise LayoutMismatchError(
            f"engine: speculative method {speculative.method} keeps KV of a kind that isn't known; "
            f"known are {', '.join(METHODS)}, and those without KV of their own"
        )
    parallel = speculative.draft_parallel_config
    ranks = config.parallel_config.tensor_parallel_size
    if parallel.tensor_parallel_size != ranks:
        raise LayoutMismatchError(
            f"engine: the draft model has {parallel.tensor_parallel_size} tensor-parallel ranks; "
            f"supported is as many as the target's ({ranks})"
        )
    return Drafting(keeps_kv=True, reads_ahead=speculative.use_eagle_block_drop())


def draft_model(config: VllmConfig) -> Any:
    """The drafter's model configuration; None where it keeps no KV of its own."""
    if not drafting(config).keeps_kv:
        return None
    return config.speculative_config.draft_model_config

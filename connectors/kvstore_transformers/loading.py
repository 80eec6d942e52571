"""load_model: reads a Hugging Face model for this engine, or says in one line why it can't.

The configuration is judged before any weight is read. Weights are read by transformers into plain
tensors and used where they are. ``revision`` is SHA-256 over the name, shape and bytes of every
tensor that the forward pass uses, in the element type that it computes with: files that differ only
in sharding give one revision, the same weights rounded to another type give another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from kvstore_transformers.errors import ModelError, UnsupportedModelError
from kvstore_transformers.model import CausalModel, weights_of
from kvstore_transformers.spec import spec_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(path_or_id: str, dtype: str = "float32") -> CausalModel:
    """Load a model folder or hub ID to compute in ``dtype``.

    Raises UnsupportedModelError for a model that this engine doesn't compute and ModelError for
    one that can't be read; code from a repository is never run.
    """
    if dtype not in DTYPES:
        raise ModelError(f"model: dtype={dtype!r}; valid are {', '.join(DTYPES)}")
    if path_or_id.startswith(("/", "./", "../", "~")) and not Path(path_or_id).is_dir():
        raise ModelError(f"model: no folder {path_or_id!r}; name a model's folder or its hub ID")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(path_or_id, trust_remote_code=False)
        spec_of(config.to_dict())
        model = AutoModelForCausalLM.from_pretrained(
            path_or_id, config=config, dtype=DTYPES[dtype], trust_remote_code=False
        )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path_or_id}: {error}") from error
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model: can't load {path_or_id!r}: {_one_line(error)}") from error
    return model_of(_identity(path_or_id), config.to_dict(), model.state_dict())


def model_of(name: str, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> CausalModel:
    """A model from a configuration (as a dictionary) and a state dictionary, which it shares."""
    spec = spec_of(config)
    if spec.tied_embeddings:
        state = {key: value for key, value in state.items() if key != "lm_head.weight"}
    weights = weights_of(spec, state)
    return CausalModel(name, weights_digest(state), spec, weights)


def load_tokenizer(path_or_id: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub ID; raises ModelError in one line."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path_or_id, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"tokenizer: can't load {path_or_id!r}: {_one_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ModelError(f"tokenizer: {path_or_id!r} has none")
    return tokenizer


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over name, type, shape and bytes of each tensor, in the order of their names; about
    half a second a GiB."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.view(torch.uint8).numpy().data if tensor.numel() else b"")
    return "sha256:" + digest.hexdigest()


def _identity(path_or_id: str) -> str:
    """A folder's full path, or the hub ID as it is."""
    folder = Path(path_or_id)
    return str(folder.resolve()) if folder.is_dir() else path_or_id


def _one_line(error: BaseException) -> str:
    """The first sentence of a foreign error's text, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

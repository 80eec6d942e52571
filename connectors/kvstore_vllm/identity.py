"""Whose KV it is: the namespace of an engine, from vLLM's configuration and the model's files.

Everything that the bytes depend on must enter; what doesn't change them must not, or nothing would
ever hit. In doubt a field is in: that costs a miss, the other way round would be wrong output.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.version import __version__ as vllm_version

from kvstore import LayoutMismatchError, Namespace
from kvstore_vllm.drafts import draft_model, drafting

BACKENDS = ("CPU_ATTN",)
"""Attention backends that were tried: their blocks hold nothing but the KV of their own tokens, and
they compute the rest of a prompt behind a prefix."""
CONTENT_BYTES_MAX = 8 << 30
"""Weights up to this size are hashed whole, about half a second a GiB."""
_OF_CONTENT = "sha256:"
_VOLATILE = ("_name_or_path", "_commit_hash", "transformers_version", "architectures_hash")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn", "mrope", "proportional")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".json")
_log = logging.getLogger("vllm.kvstore")


def namespace_of(config: VllmConfig, dtype: str, revision: str) -> Namespace:
    """The namespace; raises LayoutMismatchError where the identity can't be told for sure."""
    served = config.model_config.served_model_name
    model, revision = model_and_revision(config, revision)
    return Namespace(
        model=model,
        revision=revision,
        format=_format(config, dtype),
        config=config_digest(config),
        alias=served if isinstance(served, str) else (served or [""])[0],
    )


def model_and_revision(config: VllmConfig, given: str) -> tuple[str, str]:
    """What names the weights. A digest of what is in them names the model, too, so that nodes share
    wherever its files lie; a revision that was ``given``, or of files that weren't read, says
    something of this folder or repository only."""
    model = config.model_config
    revision = given or weights_revision(model.model, model.revision, config.load_config)
    if not given and revision.startswith(_OF_CONTENT):
        return revision, revision
    return _model_name(model.model), revision


def check_engine(config: VllmConfig) -> None:
    """Raise LayoutMismatchError, in one line, for an engine whose KV can't be reused."""
    parallel = config.parallel_config
    if not config.cache_config.enable_prefix_caching:
        raise LayoutMismatchError(f"engine: vLLM's prefix caching is off, {_why_off(config)}")
    drafting(config)
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise LayoutMismatchError("engine: context parallelism isn't supported")
    check_nodes(parallel.nnodes_within_dp)


def check_nodes(nodes: int) -> None:
    """Raise LayoutMismatchError for an engine on several nodes: by its configuration, or as its
    workers find out (with Ray, which the configuration doesn't tell)."""
    if nodes > 1:
        raise LayoutMismatchError(
            f"engine: it spans {nodes} nodes; this version serves engines on one"
        )


def config_digest(config: VllmConfig) -> str:
    """SHA-256 of the effective model configuration: the model's own with the user's overrides,
    quantisation, and what vLLM adds that changes KV."""
    model, cache = config.model_config, config.cache_config
    own = _lasting(model.hf_config.to_dict())
    facts: dict[str, Any] = {
        "model": own,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "disable_sliding_window": model.disable_sliding_window,
        "model_impl": str(model.model_impl),
    }
    drafter = draft_model(config)
    if drafter is not None:
        method = config.speculative_config.method
        facts["drafter"] = [method, _lasting(drafter.hf_config.to_dict()), _draft_weights(config)]
    if not _rope_is_static(own):
        facts["max_model_len"] = model.max_model_len
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def weights_revision(name: str, revision: str | None, load_config: Any) -> str:
    """What names the weights: the hub's commit, or for a folder a digest of its files.

    A folder above CONTENT_BYTES_MAX is named by its files' names, sizes and times of change, which
    a copy elsewhere doesn't share. Raises LayoutMismatchError where neither can be told.
    """
    if str(load_config.load_format) == "dummy":
        raise LayoutMismatchError(
            "namespace: load_format=dummy makes up its weights; name them by the setting 'revision'"
        )
    folder = Path(name)
    if folder.is_dir():
        return _folder_digest(folder)
    if folder.is_file():
        return _files_digest([folder], folder.parent)
    found = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(found, str):
        raise LayoutMismatchError(
            f"namespace: can't tell the commit of {name!r}; name it by the setting 'revision'"
        )
    return Path(found).parent.name


def _format(config: VllmConfig, dtype: str) -> str:
    """Engine and version, layout, backend, packing: what the bytes inside a block mean."""
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    kinds: set[str] = set()
    for layer in layers.values():
        backend = layer.get_attn_backend().get_name()
        if backend not in BACKENDS:
            raise LayoutMismatchError(
                f"namespace: attention backend {backend}; supported are {', '.join(BACKENDS)}"
            )
        kinds.add(f"{backend}:{layer.isa}")
    layout = config.cache_config.get_resolved_kv_cache_layout().name
    return f"vllm-cpu-{vllm_version}/{layout}/{'+'.join(sorted(kinds))}/{dtype}"


def _why_off(config: VllmConfig) -> str:
    """Why vLLM has no prefix caching."""
    if config.model_config.use_mla and not config.scheduler_config.enable_chunked_prefill:
        return (
            "as its CPU_MLA attention backend doesn't compute behind a prefix what it computes "
            "without one"
        )
    return "by its user, or for a model that it can't do it for"


def _draft_weights(config: VllmConfig) -> str:
    """What names the drafter's weights; empty where they are among the target's."""
    drafter, target = config.speculative_config.draft_model_config, config.model_config
    if drafter.model == target.model:
        return ""
    load = config.speculative_config.draft_load_config or config.load_config
    return weights_revision(drafter.model, drafter.revision, load)


def _lasting(values: dict[str, Any]) -> dict[str, Any]:
    """A configuration without what differs between copies of the same model."""
    return {
        key: _lasting(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if key not in _VOLATILE
    }


def _model_name(name: str) -> str:
    return str(Path(name).resolve()) if Path(name).exists() else name


def _rope_is_static(own: dict[str, Any]) -> bool:
    """Whether positions are turned the same way whatever the longest context is."""
    found: list[str] = []

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            kind = value.get("rope_type", value.get("type"))
            if isinstance(kind, str):
                found.append(kind)
            for inner in value.values():
                visit(inner)

    for key in ("rope_scaling", "rope_parameters"):
        visit(own.get(key))
    return all(kind in _STATIC_ROPE for kind in found)


def _folder_digest(folder: Path) -> str:
    files = sorted(p for p in folder.rglob("*") if p.suffix in _WEIGHTS and p.is_file())
    files = [p for p in files if not p.name.startswith(("tokenizer", "generation_config"))]
    return _files_digest(files, folder)


def _files_digest(files: list[Path], root: Path) -> str:
    whole = sum(path.stat().st_size for path in files) <= CONTENT_BYTES_MAX
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(f"{path.relative_to(root)}:{status.st_size};".encode())
        if whole:
            with path.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        else:
            digest.update(f"{status.st_ino}:{status.st_mtime_ns};".encode())
    if not whole:
        _log.warning(
            "kvstore: %s is too large to hash; its KV is shared by engines that load this very "
            "folder only, unless you set 'revision'", root,
        )  # fmt: skip
    return (_OF_CONTENT if whole else "files:") + digest.hexdigest()

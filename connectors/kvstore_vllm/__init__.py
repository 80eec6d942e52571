"""kvstore's connector for vLLM: external prefix hits from host memory and NVMe, through the daemon.

``vllm serve MODEL --kv-transfer-config '{"kv_connector":"KVStoreConnector","kv_role":"kv_both"}'``
finds it through the entry point ``vllm.general_plugins`` (``register``). With
``"kv_connector_module_path":"kvstore_vllm.connector"`` it works without the entry point too.
"""

from __future__ import annotations

__all__ = ["register"]

NAME = "KVStoreConnector"


def register() -> None:
    """Make the connector known to vLLM under its name. vLLM calls it in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.get_connector_class_by_name(NAME)
    except ValueError:
        KVConnectorFactory.register_connector(NAME, "kvstore_vllm.connector", NAME)

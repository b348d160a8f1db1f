"""Expert offloading with forecasts for vLLM, as a plug-in that vLLM loads once this package is installed."""

from __future__ import annotations

from expertcast_vllm.settings import Settings


def register() -> None:
    """Replace vLLM's layer of routed experts. Without expertcast options, the replacement creates vLLM's own layer.

    A second call does nothing.

    Raises:
        ExpertcastError: the options in the environment are invalid.
    """
    Settings.of(None)  # invalid options end the command before a model is loaded

    from vllm.model_executor.custom_op import op_registry_oot  # vLLM is only partly imported when plug-ins load
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from expertcast_vllm.offload import OffloadedExperts, refuse_other_experts

    name = RoutedExperts.__name__
    if op_registry_oot.get(name) is not OffloadedExperts:
        RoutedExperts.register_oot(OffloadedExperts, name=name)
        refuse_other_experts(OffloadedExperts)

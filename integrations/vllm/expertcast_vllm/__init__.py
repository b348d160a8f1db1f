"""Expert offloading with forecasts for vLLM: a plug-in that vLLM finds by itself once this package is installed."""

from __future__ import annotations

from expertcast_vllm.settings import Settings


def register() -> None:
    """Put a class in the place of vLLM's layer of routed experts. Where nobody asked for expertcast, it makes vLLM's
    own; a second call does nothing.

    Raises:
        ExpertcastError: what the environment asks for cannot be.
    """
    Settings.of(None)  # bad options end the command before a model is loaded

    from vllm.model_executor.custom_op import op_registry_oot  # vLLM is half imported when plug-ins load
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from expertcast_vllm.offload import OffloadedExperts, refuse_other_experts

    name = RoutedExperts.__name__
    if op_registry_oot.get(name) is not OffloadedExperts:
        RoutedExperts.register_oot(OffloadedExperts, name=name)
        refuse_other_experts(OffloadedExperts)

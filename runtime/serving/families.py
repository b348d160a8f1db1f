"""Names, labels and meanings of what `/metrics` shows: docs/metrics.md has the same table, and a test compares them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram", "info"]
PREFIX = "expertcast_"


@dataclass(frozen=True, slots=True)
class Described:
    """One metric."""

    kind: Kind
    name: str
    """Without the prefix, and without what its kind appends (`_total`, `_bucket`, `_info`)."""
    help: str
    labels: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The name that prometheus_client makes samples' names from."""
        return (PREFIX + self.name).rstrip("_")

    @property
    def shown(self) -> str:
        """The name by which queries ask for it."""
        return self.family + {"counter": "_total", "info": "_info"}.get(self.kind, "")


_LAYER = ("layer",)


def _per_layer(name: str, text: str) -> Described:
    return Described("counter", name, text, _LAYER)


LAYER = {
    "requests": _per_layer("expert_requests", "Distinct experts that steps of the layer needed."),
    "hits": _per_layer("expert_hits", "Requests whose expert had a slot, arrived or on its way."),
    "misses": _per_layer("expert_misses", "Requests whose copy was started only when the layer's routing was known."),
    "collisions": _per_layer("expert_collisions", "Misses of experts that were evicted earlier in the same forward."),
    "evicted": _per_layer("experts_evicted", "Experts that gave their slot to another one."),
    "skipped": _per_layer("experts_skipped", "Experts that a lossy policy left out or replaced."),
    "prefetched": _per_layer("experts_prefetched", "Copies asked for by forecasts, the dropped ones left out."),
    "prefetched_used": _per_layer("prefetches_used", "Of these, requested before they lost their slot."),
    "prefetched_in_time": _per_layer("prefetches_in_time", "Of the used ones, arrived before compute waited for them."),
    "dropped": _per_layer("prefetches_dropped", "Copies asked for by forecasts and taken back before they started."),
    "bytes_moved": _per_layer("moved_bytes", "Bytes of experts copied into slots, and of copies that are queued."),
    "waited_s": _per_layer("waiting_seconds", "Seconds that the layer's compute was blocked on copies."),
    "steps": _per_layer("layer_steps", "Times that the layer ran."),
    "chunks": _per_layer("layer_chunks", "Kernel calls; more than steps where a step's experts did not fit the slots."),
}
"""By field of :class:`expertcast.runtime.recording.statistics.LayerStatistics`."""

COPIES = Described("counter", "link_copies", "Copies of experts that have arrived in slots.")
BUSY = Described("counter", "link_busy_seconds", "Seconds in which the link had a copy under way.")
READS = Described("counter", "disk_reads", "Experts read from the disk; only where the link is the disk.")
READ_SECONDS = Described("counter", "disk_read_seconds", "Seconds in which any of these reads was under way.")

RECALL = Described("gauge", "forecast_recall", "Running share of a router's experts that its forecast named.", _LAYER)
EXPECTED = Described("gauge", "forecast_recall_expected", "The same by the checkpoint's own test.", _LAYER)
DRIFT = Described("gauge", "forecast_drift", "Mean over layers of the expected recall less the running one.")

EXPERTS = Described("gauge", "experts", "Routed experts of the model, all layers together.")
SLOTS = Described("gauge", "slots", "Experts that fit on the device.")
HELD = Described("gauge", "slots_held", "Slots that an expert has, arrived or on its way.")
SLOT_BYTES = Described("gauge", "slots_bytes", "Memory of the slots.")
STORE_BYTES = Described("gauge", "store_bytes", "What all experts take, in memory or on disk.", ("store",))

_DRAFT = ("draft",)
DRAFT_BYTES = Described("gauge", "draft_bytes", "Device memory that a draft holds beside the slots.", _DRAFT)
CYCLES = Described("counter", "draft_cycles", "Cycles of drafting and verifying.", _DRAFT)
DRAFTED = Described("counter", "draft_tokens", "Drafted tokens that were verified.", _DRAFT)
ACCEPTED = Described("counter", "draft_tokens_accepted", "Drafted tokens that stood.", _DRAFT)

REQUESTS = Described("counter", "http_requests", "Requests that ended, by route and status.", ("route", "status"))
IN_FLIGHT = Described("gauge", "http_requests_in_flight", "Requests that have not ended.")
GONE = Described("counter", "http_disconnects", "Requests whose client went away before their end.")
PROMPT_TOKENS = Described("counter", "prompt_tokens", "Tokens of prompts.")
GENERATED_TOKENS = Described("counter", "generated_tokens", "Tokens generated.")
SECONDS = Described("histogram", "http_request_seconds", "Seconds from arrival to the end.")
FIRST_TOKEN = Described("histogram", "time_to_first_token_seconds", "Seconds from arrival to the first token.")

INFO = Described("info", "", "What is served: model, predictor, mode, policies, link, versions.")

FAMILIES = (
    *LAYER.values(), COPIES, BUSY, READS, READ_SECONDS, RECALL, EXPECTED, DRIFT, EXPERTS, SLOTS, HELD, SLOT_BYTES,
    STORE_BYTES, DRAFT_BYTES, CYCLES, DRAFTED, ACCEPTED, REQUESTS, IN_FLIGHT, GONE, PROMPT_TOKENS, GENERATED_TOKENS,
    SECONDS, FIRST_TOKEN, INFO,
)  # fmt: skip
"""All of them, in the order of the page."""

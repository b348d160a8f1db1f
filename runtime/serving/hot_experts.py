"""Which experts a run used most, kept in a file from one run to the next: the next one begins with them in its slots.

L MoE layers, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import TypedDict

from expertcast.data.writer import write_where_told
from expertcast.predictors.artefacts import CLOSED, SEAL, read_json, seal
from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.engine.filling import fill_tables, held_by_tables
from expertcast.runtime.links.kernel import KernelLink
from expertcast.runtime.offloaded import OffloadedModel
from expertcast.runtime.recording.observer import Observer

_REMEDY = "the next end of serving writes it anew"


class _File(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    model: str
    fingerprint: str
    layers: int
    experts: int
    keys: list[int]
    used: list[int]
    held: list[int]
    digest: str


class HotExperts(Observer):
    """Counts how often each expert is used, and keeps it in a file with those that have slots at the end.

    Uses of earlier runs count half as much with every run: what is hot follows what is asked for. Where the link
    decides on the device nobody counts uses; the order in which slots were last used is kept in their place.

    Args:
        path: of the file.
        offloaded: the model, with no forward under way.
    """

    def __init__(self, path: Path, offloaded: OffloadedModel) -> None:
        self.path = path
        self._offloaded = offloaded
        self._keeps = offloaded.link.decides_on_device or offloaded.residency.keep
        self._shape = offloaded.view.shape
        self._fingerprint = offloaded.view.fingerprint()
        self._used: Counter[int] = Counter()
        self._before: dict[int, int] = {}
        if not offloaded.link.decides_on_device:
            offloaded.residency.tell(self)

    def needed(self, layer: int, keys: Sequence[int]) -> None:
        self._used.update(keys)

    def load(self) -> int:
        """Fill free slots with the experts that the file names, the most used first, and wait for them.

        Returns:
            How many were loaded; 0 where there is no file so far.

        Raises:
            ExpertcastError: the file is damaged, or of another model; or this offload has no cache. Slots are as they
                were, and serving can go on.
        """
        if not self.path.exists():
            return 0
        values = self._read()
        self._before = dict(zip(values["keys"], values["used"], strict=True))
        if not self._keeps:
            raise ExpertcastError("with cache=False no expert keeps its slot: leave --hot-experts out")
        used, held = self._before, list(dict.fromkeys(values["held"]))
        if not any(used.values()):
            return self._fill(held[::-1])
        place = set(held)
        return self._fill(sorted(place.union(used), key=lambda key: (-used.get(key, 0), key not in place, key)))

    def save(self) -> bool:
        """Write the file in place of the one that is there, whole or not at all.

        Returns:
            Whether it was written: not where nothing was run since it was read.

        Raises:
            ExpertcastError: its folder cannot be written.
        """
        link = self._offloaded.link
        if isinstance(link, KernelLink):
            used, held = Counter[int](), held_by_tables(link)
        else:
            used, held = self._used.copy(), sorted(self._offloaded.pool.resident())
        if not used and not (held and isinstance(link, KernelLink)):
            return False
        for key, count in self._before.items():
            if count // 2:
                used[key] += count // 2
        order = sorted(used, key=lambda key: (-used[key], key))
        values: dict[str, object] = {
            "model": self._offloaded.view.model_id, "fingerprint": self._fingerprint, "layers": self._shape.layers,
            "experts": self._shape.experts, "keys": order, "used": [used[key] for key in order], "held": held,
        }  # fmt: skip
        write_where_told(self.path, (json.dumps(seal(values)) + "\n").encode())
        return True

    def _read(self) -> _File:
        values = read_json(self.path, _File, _REMEDY)
        assert SEAL in values
        shape = self._shape
        if (values["fingerprint"], values["layers"], values["experts"]) != (
            self._fingerprint, shape.layers, shape.experts,
        ):  # fmt: skip
            raise ExpertcastError(f"{self.path} is of another model, {values['model']}; {_REMEDY}")
        every = range(shape.layers * shape.experts)
        if (
            len(values["keys"]) != len(values["used"])
            or any(key not in every for key in [*values["keys"], *values["held"]])
            or any(count < 0 for count in values["used"])
        ):
            raise ExpertcastError(f"{self.path} names experts that its model has not; {_REMEDY}")
        return values

    def _fill(self, order: Sequence[int]) -> int:
        """The hottest of each layer's share, or of all, the hottest last: it is the newest then."""
        offloaded, experts = self._offloaded, self._shape.experts
        if isinstance(offloaded.link, KernelLink):
            free = offloaded.pool.count - len(held_by_tables(offloaded.link))
            return fill_tables(offloaded.link, order[:free][::-1], experts)
        residency = offloaded.residency
        room, chosen = Counter[int](), list[int]()
        shared = len(offloaded.pool.free_slots)
        for key in order:
            layer = key // experts
            if len(chosen) < shared and room[layer] < residency.free(layer) and not residency.holds(key):
                room[layer] += 1
                chosen.append(key)
        return residency.fill(chosen[::-1])

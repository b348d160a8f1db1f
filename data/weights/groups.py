"""Groups of a checkpoint's tensors that transformers converts together to parameters, from names alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from transformers import MergeModulelist, PreTrainedModel, WeightConverter
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.integrations.mxfp4 import Mxfp4Dequantize
from transformers.quantizers import HfQuantizer

from expertcast.data.weights.files import WeightFiles, check_complete

_NUMBER = re.compile(r"(\d+)")
_EXPERT = re.compile(r"\bexperts\.\d+\.")


@dataclass(slots=True)
class Group:
    """Checkpoint tensors that one conversion merges into one or more parameters."""

    target: str
    """Full name of the (first) parameter."""
    converter: WeightConverter | None
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Names of the checkpoint tensors, by the converter's source pattern, in order."""

    @property
    def mxfp4(self) -> bool:
        """Whether the tensors are MXFP4 blocks and scales."""
        return self.converter is not None and isinstance(self.converter.operations[0], Mxfp4Dequantize)

    @property
    def by_expert(self) -> bool:
        """Whether each expert has tensors of its own."""
        return self.converter is not None and isinstance(self.converter.operations[0], MergeModulelist)

    def missing(self, count: int) -> list[str]:
        """Return the tensors that the group lacks: whole patterns, or those of some numbers.

        Args:
            count: how many tensors of a pattern with several ones there must be: those with the numbers from 0 on.
        """
        if self.converter is None:
            return []
        patterns = self.converter.source_patterns
        missing = [f"{self.target} ({pattern})" for pattern in patterns if pattern not in self.sources]
        for names in self.sources.values():
            first, last = _NUMBER.split(names[0]), _NUMBER.split(names[-1])
            numbers = range(1, min(len(first), len(last)), 2)
            place = next((at for at in numbers if first[at] != last[at]), None)
            if place is None or (len(names) == count and int(last[place]) == count - 1):
                continue
            there = {_NUMBER.split(name)[place] for name in names}
            before, after = "".join(first[:place]), "".join(first[place + 1 :])
            missing += [f"{before}{number}{after}" for number in range(count) if str(number) not in there]
        return missing


def grouped(model: PreTrainedModel, files: WeightFiles, quantizer: HfQuantizer | None = None) -> dict[str, Group]:
    """Return the groups of a checkpoint's tensors by their targets, with the conversions of `from_pretrained`.

    Args:
        model: the model without weights.
        files: the checkpoint.
        quantizer: quantizer of a quantised checkpoint, configured to dequantise.

    Raises:
        ExpertcastError: a group lacks tensors.
    """
    mapping = get_model_conversion_mapping(model, hf_quantizer=quantizer)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix, state = model.base_model_prefix, model.state_dict()
    groups: dict[str, Group] = {}
    alike: dict[str, list[tuple[str, str | None]]] = {}
    for name in files.tensors:
        found = alike.setdefault(_EXPERT.sub("experts.*.", name, 1), [])
        if len(found) < 2 or found[0] != found[1]:  # else all experts' tensors of this name go to one parameter
            found.append(rename_source_key(name, renamings, converters, prefix, state))
        target, pattern = found[-1]
        if target not in state and name in state:  # as in transformers: the name is right without renaming
            target, pattern = rename_source_key(name, [], [], prefix, state)
        group = groups.setdefault(target, Group(target, None if pattern is None else by_pattern[pattern]))
        group.sources.setdefault(target if pattern is None else pattern, []).append(name)
    merged = {target: group for target, group in groups.items() if target in state and state[target].dim()}
    check_complete([name for target, group in merged.items() for name in group.missing(len(state[target]))])
    return groups

"""Sections of a command's help on predictors, policies, presets and drafts.

The registries, the docstrings of their classes and those of the fields of their options are the source.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Collection

from expertcast.commands.options import lowered
from expertcast.predictors import names, predictor_class
from expertcast.predictors.options import field_docs, settable, written
from expertcast.runtime.drafts.names import AUTO, AutoOptions, draft_names
from expertcast.runtime.policies import PRESETS, Policies
from expertcast.runtime.policies.eviction import SCOPES
from expertcast.runtime.policies.settings import KINDS

_LEFT = 24
"""Width of a name, as in the rest of the help."""


def catalogue(flags: Collection[str]) -> str:
    """Return the sections for a command's options, in order; empty if no option needs one.

    Args:
        flags: flags of the command, such as `--predictor`.
    """
    made = dict.fromkeys(section for flag, its in _SECTIONS.items() if flag in flags for section in its)
    if predictors_and_fields in made:
        made.pop(predictors, None)
    return "".join(f"\n{section()}\n" for section in made)


def predictors(*, fields: bool = False) -> str:
    """Return a line per predictor; with `fields`, also its options for `--set`."""
    found = []
    for name in names():
        cls = predictor_class(name)
        own = _fields(cls.config_class, leave_out="ahead") if fields else []
        found.append(_entry(name, _summary(cls)) + own)
    heading = "predictors, and their options for --set (KEY=VALUE)" if fields else "predictors"
    return _section(heading, *found)


def predictors_and_fields() -> str:
    """Return :func:`predictors` with fields."""
    return predictors(fields=True)


def policies() -> str:
    """Return every policy by its kind, with its options."""
    parts = []
    docs = {kind: lowered(said.rstrip(".")) for kind, said in field_docs(Policies).items()}
    for kind, registry in KINDS.items():
        entries = []
        for cls in registry.classes():
            notes = [note for note in ("lossy", "offline") if getattr(cls, note, False)]
            said = _summary(cls) + "".join(f" [{note}]" for note in notes)
            entries.append(_entry(cls.name, said) + _fields(cls.config_class))
        parts.append(_section(f"{kind}: {docs[kind]}", *entries))
    parts.append(_section(f"scope: {docs['scope']}", *(_entry(name, "") for name in SCOPES)))
    heading = (
        "policies, each NAME or NAME:OPTION=VALUE,...; lossy ones change the output, offline ones are only simulated"
    )
    return "\n\n".join([_section(heading), *parts])


def presets() -> str:
    """Return every preset with its source and policies."""
    entries = []
    for name, preset in PRESETS.items():
        default = Policies().as_dict()
        made = [f"{kind}={word}" for kind, word in preset.policies.as_dict().items() if word != default[kind]]
        said = "; ".join([preset.source, " ".join(made) or "defaults", f"forecasts by {preset.predictor or 'nothing'}"])
        entries.append(_entry(name, said))
    return _section("presets, of published systems", *entries)


def drafts() -> str:
    """Return the names of drafts and their options; :func:`policies` shows those of lossy policies."""
    entry = _entry("", ", ".join(draft_names()))
    return _section("drafts", entry, _entry(AUTO, "") + _fields(AutoOptions))


_SECTIONS: dict[str, tuple[Callable[[], str], ...]] = {
    "--set": (predictors_and_fields,),
    "--predictor": (predictors,),
    "--policies": (policies, presets),
    "--policy": (policies,),
    "--preset": (presets,),
    "--draft": (drafts,),
}
"""Sections by the option whose values they describe."""


def _section(heading: str, *entries: list[str]) -> str:
    return "\n".join([*_wrapped(f"{heading}:", ""), *(line for entry in entries for line in entry)])


def _entry(name: str, said: str, indent: str = "  ") -> list[str]:
    """Return a name with its description, beside it or, after a long name, below."""
    if len(indent + name) > _LEFT - 2:
        return [indent + name, *_wrapped(said, " " * _LEFT)]
    first, *others = _wrapped(said, " " * _LEFT) or [""]
    return [f"{indent}{name}".ljust(_LEFT) + first.lstrip(), *others]


def _fields(config: type, leave_out: str = "") -> list[str]:
    """Return a line for each field that text can set: name, default and docstring."""
    docs, lines = field_docs(config), list[str]()
    for name in settable(config):
        if name != leave_out:
            said = lowered(docs[name].rstrip("."))
            lines += _entry(f"{name}={written(getattr(config(), name))}", said, indent="    ")
    return lines


def _summary(cls: type) -> str:
    """Return the first sentence of a class's docstring, without markup."""
    text = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
    text = re.sub(r":\w+:`(?:[^<`]*<)?[.~]*([^>`]+)>?`", r"\1", text).replace("`", "")
    return lowered(re.split(r"(?<=[^.]\.)\s+(?=[A-Z])|: ", text)[0].rstrip("."))


def _wrapped(text: str, indent: str) -> list[str]:
    """Wrap text to the width of argparse."""
    width = max(60, shutil.get_terminal_size().columns - 2)
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)

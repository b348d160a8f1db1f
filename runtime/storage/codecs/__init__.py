"""Codecs: the forms in which a store holds experts. All registrations are here, in the order of printed tables."""

from expertcast.predictors.base import Registry
from expertcast.predictors.options import parse_options
from expertcast.runtime.storage.codecs.base import Codec, CodecConfig, Part, Plane, Shard
from expertcast.runtime.storage.codecs.lossless import BitSplit, Raw
from expertcast.runtime.storage.codecs.quantised import Fp8, Mxfp4
from expertcast.runtime.storage.layout import BlockLayout

__all__ = ["CODECS", "Codec", "CodecConfig", "Part", "Plane", "Shard", "check_codec", "make_codec"]

CODECS: Registry[Codec] = Registry("codec")
for _codec in (Raw, BitSplit, Mxfp4, Fp8):
    CODECS.register(_codec)


def make_codec(text: str, layout: BlockLayout) -> Codec:
    """Create the codec that a text names: `name` or `name:option=value,option=value`.

    Raises:
        ExpertcastError: the name, an option or a value is invalid, or the codec cannot hold these experts.
    """
    cls, config = _parsed(text)
    return cls(config, layout)


def check_codec(text: str) -> None:
    """Check the text of a codec, before anything is loaded.

    Raises:
        ExpertcastError: the name, an option or a value is invalid.
    """
    _parsed(text)


def _parsed(text: str) -> tuple[type[Codec], CodecConfig]:
    name, _, options = text.partition(":")
    cls = CODECS.get(name)
    return cls, parse_options(options, cls.config_class, f"codec {name!r}")

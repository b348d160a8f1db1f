"""Run by tests in a process of its own, to be killed or to be one of two ranks: collects reference traces."""

from __future__ import annotations

import json
import sys

from expertcast.data.collect import collect
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.text import load_documents


def main() -> None:
    settings = json.loads(sys.argv[2])
    collect(load_model("reference"), load_tokenizer("reference"), load_documents("reference"), sys.argv[1], **settings)


if __name__ == "__main__":
    main()

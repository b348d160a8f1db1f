"""Commands that stand in the project's pages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def commands_of(page: str) -> list[str]:
    """What stands behind `expertcast` in a page's blocks of shell commands, without comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^expertcast (.*)$", "".join(blocks), flags=re.MULTILINE)
    return [line.partition(" #")[0].strip() for line in lines]

"""What a disk answers is one line."""

from __future__ import annotations

import errno
import os

import pytest

from expertcast.cli import main
from expertcast.commands import inspect


@pytest.mark.parametrize("name", [None, "traces/trace.json.partial"])
def test_a_full_disk_is_one_line(
    name: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    monkeypatch.setattr(inspect, "run", full)
    assert main(["inspect", "traces"]) == 2
    where = "" if name is None else f" {name}"
    assert capsys.readouterr().err == (
        f"expertcast: cannot read or write{where}: No space left on device; make room, or name another folder, and run "
        "the same command again\n"
    )


def test_what_is_no_disks_answer_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: object) -> None:
        raise ConnectionError(errno.ECONNRESET, "reset")

    monkeypatch.setattr(inspect, "run", lost)
    with pytest.raises(ConnectionError):
        main(["inspect", "traces"])

"""Result files that a benchmark goes on with where it stopped."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from expertcast.checkpoints.provenance import provenance
from expertcast.commands.output import write_json
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json
from expertcast.runtime.benchmarking.bench import hardware


class ResultFile:
    """The result of a benchmark, and the file that holds it after every run.

    Args:
        path: of the file; an earlier result there is gone on with.
        settings: with which its runs must have been made, under `settings` there.

    Raises:
        ExpertcastError: the file is of other settings, or holds no result.
    """

    def __init__(self, path: Path, settings: Json) -> None:
        self._path = path
        self.values: Json = {"settings": settings, "runs": []}
        if path.is_file():
            self.values = self._earlier(settings)

    def write(self) -> None:
        """Write the values with date, the command that started this process, versions and hardware."""
        self.values |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), **provenance()}
        write_json(self._path, {**self.values, "hardware": hardware()})

    def _earlier(self, settings: Json) -> Json:
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError) as error:
            raise ExpertcastError(
                f"{self._path} holds no result ({error}): remove it, or give another --out"
            ) from error
        if not isinstance(found, dict) or found.get("settings") != settings:
            raise ExpertcastError(f"{self._path} is of other settings: remove it, or give another --out")
        return found

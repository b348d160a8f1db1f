"""Result files that a benchmark can resume."""

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
    """Result of a benchmark, written to a file after every run.

    Args:
        path: the file; an existing one is resumed.
        settings: settings of the runs, stored under `settings`.

    Raises:
        ExpertcastError: the file has other settings, or is not a result.
    """

    def __init__(self, path: Path, settings: Json) -> None:
        self._path = path
        self.values: Json = {"settings": settings, "runs": []}
        if path.is_file():
            self.values = self._earlier(settings)

    def write(self) -> None:
        """Write the values with date, command, versions and hardware."""
        self.values |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), **provenance()}
        write_json(self._path, {**self.values, "hardware": hardware()})

    def _earlier(self, settings: Json) -> Json:
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError) as error:
            raise ExpertcastError(f"{self._path} is not a result ({error}): remove it, or use another --out") from error
        if not isinstance(found, dict) or found.get("settings") != settings:
            raise ExpertcastError(f"{self._path} has other settings: remove it, or use another --out")
        return found

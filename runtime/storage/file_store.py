"""What every store whose experts lie in a file of its own has in common: the folder, and whether its file is used."""

from __future__ import annotations

import tempfile
import warnings
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import MoEView
from expertcast.runtime.storage.arrival import Arrival, Reader
from expertcast.runtime.storage.draft import Draft, can_be_nameless
from expertcast.runtime.storage.layout import ExpertsForm
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.storage.store_header import StaleFileError, StoreFormat, layout_text


class FileStore(ExpertStore):
    """Experts in one file.

    Args:
        view: the model's MoE layers, or the form of its experts.
        folder: where the file lies; made if need be, one folder per model. None: it has no name, and is
            gone after `close` or when the process ends, however that does (on systems other than Linux it is in a
            temporary folder, which `close` removes).
        fingerprint: of what the blocks are made from. A file in `folder` with the same is used as it is, another is
            made again. None: it is made again in any case.
        device: where the model computes. None: where the experts lie.

    Raises:
        ExpertcastError: the folder holds a file of that name that is not ours.
    """

    name = "disk"
    file_name: ClassVar[str]

    def __init__(
        self,
        view: MoEView | ExpertsForm,
        folder: str | Path | None = None,
        *,
        device: torch.device | None = None,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__(view, device=device)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._nameless = folder is None and can_be_nameless()
        self._draft: Draft | None = None
        """Of a file without a name, which goes with it."""
        if folder is None and not self._nameless:
            self._temporary = tempfile.TemporaryDirectory(prefix="expertcast-")
            folder = self._temporary.name
        self.path = Path(tempfile.gettempdir() if folder is None else folder) / self.file_name
        """Of the file; of one without a name once it is written, for this process."""
        self._form = StoreFormat(
            layers=self.layers, experts=self.experts, block_bytes=self.layout.block_bytes,
            layout=layout_text(self.layout), model_id=view.model_id, fingerprint=fingerprint or "",
        )  # fmt: skip
        self._begin()
        if not self._nameless and self.path.exists():
            try:
                self._check()
                if fingerprint is not None:
                    self._open()
            except StaleFileError as reason:
                warnings.warn(f"{str(self.path)!r} is made again: {reason}", stacklevel=3)

    def open(self, layer: int) -> dict[str, Tensor]:
        """
        Raises:
            ExpertcastError: always: a file's layers are closed, with their digests, one after another.
        """
        raise ExpertcastError("a store on disk is written first layer to last, each by fill: open is for memory")

    def _new_draft(self) -> Draft:
        """Where all layers are written."""
        if not self._nameless:
            return Draft(self.path)
        self._draft = Draft(None)
        return self._draft

    @abstractmethod
    def _begin(self) -> None:
        """No file is used yet; `_form` says what one that can be used holds."""

    @abstractmethod
    def _check(self) -> None:
        """Look at the file that is there.

        Raises:
            ExpertcastError: it is not ours.
            StaleFileError: it is damaged; the text says how.
        """

    @abstractmethod
    def _open(self) -> None:
        """Use the file that is there.

        Raises:
            StaleFileError: it must be made again; the text says why.
        """

    @abstractmethod
    def _drop(self) -> None:
        """Let go of the file, and remove one that was not completed."""

    @abstractmethod
    def reader(self, threads: int, pace: float | None) -> Reader:
        """A new reader of the file, past the system's page cache, for what :meth:`read` makes.

        Args:
            threads: reads under way at a time.
            pace: bytes per second that the disk is taken for, at most; None: as it is.
        """

    @abstractmethod
    def read(self, key: int, block: Tensor, arrival: Callable[[Any], None], urgent: bool) -> Arrival:
        """What is to be asked of a :meth:`reader` for one expert's block.

        Args:
            key: the expert.
            block: uint8 [block_bytes] in host memory, to be filled.
            arrival: called by the thread that filled it.
            urgent: it comes before all forecasts.
        """

    def close(self) -> None:
        self._drop()
        super().close()
        if self._draft is not None:
            self._draft.drop()
        if self._temporary is not None:
            self._temporary.cleanup()

"""Forecasts that run beside a layer's experts: on a stream of their own, read back when those have been launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from expertcast.runtime.links.driver import CudaDevice


class Beside:
    """A second stream of the device that computes.

    What runs on it reads tensors of the first one, a cache among them, that the next block may free: whoever made a
    forecast there reads it back, which comes last, before that block starts.
    """

    def __init__(self, driver: CudaDevice) -> None:
        self._driver, self._stream = driver, driver.new_stream()

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is launched inside runs behind what has been launched so far, and beside what follows."""
        self._stream.wait_stream(self._driver.current_stream())
        with self._driver.use(self._stream):
            yield

"""Tests for test_gpu_day.py to run, one of which hangs and one of which takes its process down; not collected."""

from __future__ import annotations

import os
import time

import pytest


def test_first() -> None:
    pass


def test_hangs() -> None:
    time.sleep(600)


def test_crashes() -> None:
    os._exit(77)


def test_fails() -> None:
    raise AssertionError("so it does")


@pytest.mark.skip(reason="for once")
def test_skips() -> None:
    pass


def test_last() -> None:
    pass

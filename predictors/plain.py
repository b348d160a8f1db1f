"""Results as plain values: what goes into a JSON file as it is."""

from __future__ import annotations

from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]
"""A JSON object: numbers, texts, booleans, None, and lists and objects of these."""

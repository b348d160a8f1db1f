"""The one exception that expertcast raises for what a user can put right, and what others say in one line."""

import json

_MISMATCHED = "ignore_mismatched_sizes"
"""In what transformers says, after it has logged a report."""


class ExpertcastError(ValueError):
    """Bad input: the message is one line that names what is wrong and the remedy.

    The command line prints the line and exits with status 2. Every other exception is a bug.
    """


def first_line(error: Exception) -> str:
    """What an error says, in one line; its kind where it says nothing."""
    text = str(error).strip()
    if isinstance(error, json.JSONDecodeError):
        return f"a file of it is damaged, which is no JSON ({text.splitlines()[0]}): fetch it again"
    if _MISMATCHED in text:
        return "its configuration and its weights disagree about their sizes: one of them is damaged, fetch it again"
    return text.splitlines()[0] if text else type(error).__name__

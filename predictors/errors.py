"""The one exception that expertcast raises for what a user can put right, and what others say in one line."""


class ExpertcastError(ValueError):
    """Bad input: the message is one line that names what is wrong and the remedy.

    The command line prints the line and exits with status 2. Every other exception is a bug.
    """


def first_line(error: Exception) -> str:
    """What an error says, in one line; its kind where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__

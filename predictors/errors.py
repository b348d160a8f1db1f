"""The one exception that expertcast raises for what a user can put right."""


class ExpertcastError(ValueError):
    """Bad input: the message is one line that names what is wrong and the remedy.

    The command line prints the line and exits with status 2. Every other exception is a bug.
    """

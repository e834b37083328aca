"""How a deploy refuses: pyinfra ends with status 1 and prints the text, without a traceback.

pyinfra lets its own kind of error out of a deploy file as it is, and prints the command line's kind
of error without the place in the code, which here would point at us and not at the owner's file.
An error that is both gets both.
"""

from collections.abc import Sequence

from pyinfra.api.exceptions import DeployError
from pyinfra_cli.exceptions import CliError  # type: ignore[import-untyped]


class Refusal(DeployError, CliError):  # type: ignore[misc]
    """The run cannot go on; the lines say what is wrong and what to do."""

    def __init__(self, what: str, lines: Sequence[str]) -> None:
        CliError.__init__(self, "\n    ".join([f"{what}:", *lines]))

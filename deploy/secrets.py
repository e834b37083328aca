"""Secrets of the controller: read by name, wrapped at once, never a setting with a value."""

import os
from typing import TYPE_CHECKING

from pyinfra.api import HiddenValue
from pyinfra.api.exceptions import PyinfraError

if TYPE_CHECKING:
    from deploy.settings import Settings


def hub_token(chosen: "Settings") -> HiddenValue | None:
    """Return the Hub token from HF_TOKEN or the file named in the settings; None without one.

    The token is stripped: a copied newline or carriage return would be sent as part of it.
    """
    text = os.environ.get("HF_TOKEN", "")
    if not text.strip() and chosen.hub_token_file is not None:
        try:
            text = chosen.hub_token_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PyinfraError(
                f"hub_token_file: {chosen.hub_token_file} cannot be read ({error})"
            ) from error
    return HiddenValue(text.strip()) if text.strip() else None

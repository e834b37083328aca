"""Secrets of the controller: read by name, wrapped at once, never a setting with a value."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pyinfra.api import HiddenValue
from pyinfra.api.exceptions import PyinfraError

from dsv4.hub import Refused, clean_token

if TYPE_CHECKING:
    from deploy.settings import Settings


def hub_token(chosen: "Settings") -> HiddenValue | None:
    """Return the Hub token from HF_TOKEN or the file named in the settings; None without one.

    One that cannot be a token (quotes, a line end inside) is refused here, unseen: the hub would
    answer it with a sentence about something else.
    """
    try:
        token = clean_token(os.environ.get("HF_TOKEN", ""), "HF_TOKEN")
        if token is None and chosen.hub_token_file is not None:
            token = token_of(chosen.hub_token_file)
    except Refused as error:
        raise PyinfraError(str(error)) from None
    return HiddenValue(token) if token else None


def token_of(path: Path) -> str:
    """Return the token in a file; one that is named and holds none is a mistake."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"hub_token_file: {path} cannot be read ({error})") from error
    token = clean_token(text, f"hub_token_file: {path}")
    if token is None:
        raise Refused(f"hub_token_file: {path} is empty; put the token in it, or unset it")
    return token

"""Switches in the environment of the process."""

from __future__ import annotations

import os

# All variables that Weft reads.
VARIABLES = ("WEFT_BACKEND", "WEFT_BUNDLE", "WEFT_CHOICES", "WEFT_NO_JIT", "WEFT_QUIET")
OFF = ("", "0", "false", "no", "off")


def is_on(variable: str) -> bool:
    """Return whether a variable is set to anything but a word for "off".

    >>> import os
    >>> os.environ["WEFT_EXAMPLE"] = "yes"
    >>> is_on("WEFT_EXAMPLE")
    True
    >>> os.environ["WEFT_EXAMPLE"] = "False"
    >>> is_on("WEFT_EXAMPLE"), is_on("WEFT_NOTHING")
    (False, False)
    >>> del os.environ["WEFT_EXAMPLE"]
    """
    return os.environ.get(variable, "").strip().lower() not in OFF

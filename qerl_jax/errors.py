"""The one exception for mistakes that a user can mend."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """What was wrong, where, what is allowed and what to do. The command line prints it without a traceback."""


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the known name closest to `name`, or an empty string when none is close."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {match[0]!r}?)" if match else ""

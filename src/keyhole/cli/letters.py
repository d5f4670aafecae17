"""Letters of mathematics on terminals whose encoding lacks them: as people type them."""

from __future__ import annotations

import codecs

# The name by which streams know it, as in `stream.reconfigure(errors=AS_TYPED)`.
AS_TYPED = "keyhole-as-typed"
TYPED = {"×": "x", "⁻": "^-", "−": "-", "±": "+-", "≤": "<=", "·": "*", "–": "-", "…": "...", "\u00a0": " "}
TYPED |= dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789", strict=True))


def as_typed(error: UnicodeError) -> tuple[str, int]:
    """What is printed in place of letters that the encoding lacks, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(TYPED.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


codecs.register_error(AS_TYPED, as_typed)

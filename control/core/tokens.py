"""Session tokens: what the commands of a life have to show if its open came with one.

Responsible for the digest that is kept in the token's place, and for comparing. Leaves the length of a token and its
way into a digest's hands to `control/wire/commands.py`: nothing behind the decoder ever sees a token. Pure. A digest
does not show itself in a repr, so that no log and no traceback holds one.
"""

from __future__ import annotations

from hashlib import sha256
from hmac import compare_digest
from typing import Any

from msgspec import Struct


class TokenDigest(Struct, frozen=True, gc=False, array_like=True):
    """The SHA-256 of a token. Good for checking one, no good for sending one."""

    sha256: bytes

    def __repr__(self) -> str:
        """Says that there is one, and no more."""
        return "TokenDigest(...)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Not even that for whoever prints nicely."""
        return []


def digest_token(token: bytes) -> TokenDigest:
    """What is kept of a token, given as its UTF-8."""
    return TokenDigest(sha256(token).digest())


def is_right(kept: TokenDigest, shown: TokenDigest | None) -> bool:
    """Whether a command shows the token that its session was opened with. Takes as long for a near miss as for any."""
    return shown is not None and compare_digest(kept.sha256, shown.sha256)

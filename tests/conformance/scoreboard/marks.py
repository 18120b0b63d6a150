"""What can become of a row, in words that every process of the scoreboard knows."""

from __future__ import annotations

SUPPORTED = "supported"
REFUSED = "refused"
"""The server said no, or the SDK did, in a sentence for its user."""
FAILED = "failed"
"""Anything else that went wrong."""
NOT_TRIED = "not tried"
"""Nobody has said how to call it."""
ABSENT = "absent"
"""This version does not offer it."""

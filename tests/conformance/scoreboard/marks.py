"""Outcomes of a row, common to every process of the scoreboard."""

from __future__ import annotations

SUPPORTED = "supported"
REFUSED = "refused"
"""The server or the SDK refused the call with a message for the user."""
FAILED = "failed"
"""Any other error."""
NOT_TRIED = "not tried"
"""The scoreboard has no recipe for the call."""
ABSENT = "absent"
"""This version does not have the method."""

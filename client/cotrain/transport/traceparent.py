"""The caller's span, where its program traces with OpenTelemetry: a server that traces puts its own below it.

Nothing is imported for this: a program that traces has imported it.
"""

from __future__ import annotations

import sys


def traceparent() -> dict[str, str]:
    """Give the header that names the caller's span; nothing where there is none."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    flags = int(context.trace_flags)
    return {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"}

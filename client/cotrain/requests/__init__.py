"""Requests in flight: order, flow control, chunks, polling, futures."""

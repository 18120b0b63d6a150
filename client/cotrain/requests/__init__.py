"""What was sent and is not answered yet: order, flow control, chunks, polling, futures."""

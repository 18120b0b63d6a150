"""The objects a user holds; they know what to ask, and leave how to `requests` and `transport`."""

"""From a logged op to an engine op and from its output to a result; the one place that knows both."""

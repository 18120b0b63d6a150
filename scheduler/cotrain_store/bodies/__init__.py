"""Codecs between the bodies of ops and arrays, independent of the queue and the engine."""

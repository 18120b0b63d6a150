"""The generated messages of `wire.proto`, and the command that makes them."""

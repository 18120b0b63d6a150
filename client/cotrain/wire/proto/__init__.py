"""Generated messages of `wire.proto`, and the command that generates them."""

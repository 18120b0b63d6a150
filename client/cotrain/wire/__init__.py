"""Messages between client and server, as JSON and as protobuf, independent of any transport."""

"""What crosses the network, as JSON and as protobuf; knows no connection and no server."""

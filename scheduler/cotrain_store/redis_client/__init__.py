"""Redis client, the only importer of redis: connections, batching, subscriptions, the embedded server."""

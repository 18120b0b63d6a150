"""Redis client, the only importer of redis: addresses, connections, subscriptions and scripts."""

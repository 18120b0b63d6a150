"""Names and arguments of the hosted SDKs; nothing here sends anything."""

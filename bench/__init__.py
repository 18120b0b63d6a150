"""Programs that measure the house, one a file; what they are made of lies in the rooms below."""

"""The endpoints, one file per subject. A route translates between the wire and the store."""

"""The subcommands of `cotrain` that speak to a server as its tenant or its operator."""

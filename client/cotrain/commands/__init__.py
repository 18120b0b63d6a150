"""Subcommands of `cotrain` for tenants and operators of a server."""

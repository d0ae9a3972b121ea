"""The commands, most of which work without a server."""

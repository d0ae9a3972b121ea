"""The commands that decode without a server."""

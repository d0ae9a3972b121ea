"""Uploads in, picture files out."""

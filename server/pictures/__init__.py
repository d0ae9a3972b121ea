"""Uploads in, PNG out."""

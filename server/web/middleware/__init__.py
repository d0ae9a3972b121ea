"""Middleware: every request passes it before its route, and every answer after it."""

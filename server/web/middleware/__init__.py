"""What every request passes before a route, and every answer after it."""

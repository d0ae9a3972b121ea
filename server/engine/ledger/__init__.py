"""Admitted requests, from their head to their end, and the room that each model has. Used on the event loop only."""

"""Slots and queue in plain Python, without torch, and how long a step takes."""

"""The schedule: slots, the queue, and how long a step takes. Plain Python, without torch."""

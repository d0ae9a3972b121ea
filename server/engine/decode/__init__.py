"""One quantum: prefill, decode, and what happens when an image fails."""

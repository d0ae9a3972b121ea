"""One quantum: prefill, decode, and what happens when a row fails."""

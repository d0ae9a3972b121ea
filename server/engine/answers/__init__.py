"""What a request or a command draws, and which of the images drawn are its answers."""

"""HTTP: what is asked for, admission, answers. The only room that knows FastAPI."""

"""HTTP: requests, admission, answers. Besides app.py and serve.py, the only package that imports FastAPI."""

"""HTTP: what requests ask for, uploads, answers. Besides app.py and serve.py, the only package that
imports FastAPI.
"""

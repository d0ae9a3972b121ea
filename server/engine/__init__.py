"""The engine: one thread decodes the images of all models."""

"""One thread decodes the images of all models."""

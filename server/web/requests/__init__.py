"""Requests of the images routes: their fields checked against a model, their pictures decoded, their answers sent."""

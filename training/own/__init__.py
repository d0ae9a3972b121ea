"""Training on a user's own pictures: choice of preset, inherited weights, class agreement,
progress.
"""

"""What no shipped model uses, for experiments only: other feature maps, pre-norm, and reversible
residuals.
"""

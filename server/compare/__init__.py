"""The benchmark of attention backends, live between quanta or from the command line."""

"""One file for each group of routes; a route translates, and does nothing else."""

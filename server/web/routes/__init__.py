"""The routes, one file for each group. A route translates between HTTP and the engine, and does
nothing else.
"""

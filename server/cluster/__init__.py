"""Several processes that serve as one, on Ray Serve: fronts for HTTP, replicas that decode, and a desk between them.

messages    what a front asks of a replica
replica     one engine: the Core of the plain server, which is given orders instead of HTTP requests
front       HTTP without an engine: a ledger whose images are drawn by replicas
desk        what all fronts must agree on: clients' images, rates of keys, when to drain; the metrics of all as one
choosing    which replica will be done first
scaling     how many replicas there should be
serving     the HTTP server of a front, and what stands in it for models, comparisons and keys that are elsewhere
-- only the files below import Ray --
router      that choice as Ray Serve asks for it
deployments the three above as deployments of Ray Serve, and `app` for `serve deploy`
local       `linpix serve --replicas`: a cluster on this machine alone, until a signal ends it
"""

"""Several processes that serve as one, on Ray Serve: fronts for HTTP, replicas that decode, and a desk between them.

messages    what a front asks of a replica
replica     one engine: the Core of the plain server, which is given orders instead of HTTP requests
front       HTTP without an engine: a ledger whose images are drawn by replicas
desk        what all fronts must agree on: clients' images, rates of keys, when to drain; and all metrics as one
choosing    which replica will be done first
scaling     how many replicas there should be
serving     the HTTP server of a front, with stand-ins for models, comparisons and keys of other processes
-- only the files below import Ray --
router      choosing, as a request router of Ray Serve
deployments desk, replicas and fronts as deployments of Ray Serve, and `app` for `serve deploy`
local       `linpix serve --replicas`: a cluster on this machine alone, until a signal ends it
"""

"""The same application several times, on Ray Serve: fronts for HTTP, and replicas that draw. It is
cut at the engine: a front is the plain server with replicas in the place of its engine, a replica
is the engine without HTTP.

A replica admits requests for itself, as the plain server does. Serve chooses the replica, replaces
those that die, scales and drains.

remote      the Drawer of a front: replicas draw
replica     one engine, which is called by fronts
front       the HTTP server of a front; and where Prometheus finds the metrics of each process
scaling     how many replicas there should be
-- only the files below import Ray --
deployments replicas and fronts as deployments of Ray Serve, and `app` for `serve deploy`
local       `linpix serve --replicas`: a cluster on this machine alone, until a signal ends it
"""

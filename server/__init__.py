"""The service: a map of its packages. Each imports only its own files, base files, and packages below it in this list.

cli/          the commands, most of which work without a server: serve, sample, complete, score, compare, doctor, key
cluster/      several processes that serve as one, on Ray Serve: fronts for HTTP, replicas that decode, a desk
app, serve    app.py puts routes and middleware over what decodes (core.py); serve.py runs them until a signal
web/          HTTP: requests, admission, answers
  middleware/   what every request passes before a route
  routes/       one file for each group of routes
compare/      the benchmark of attention kinds, live and from the command line
engine/       what is admitted (on the event loop), and the thread that decodes it
  decode/       one quantum: prefill, decode, and what happens when an image fails; likelihoods between quanta; which
                candidates are the best; particles, for known pixels after a hole
  schedule/     plain Python: who waits and runs, how long a step takes, when each image will be done
pictures/     uploads in, PNG out: size, orientation, occlusion, photographed digits, and one thread pool shared fairly
base          settings, errors, metrics, logs, origins, listening, fault_rules: what every package may use
static/       the web page, which uses nothing but the API

To follow one request, read these files in this order:
  web/admission.py           its ticket, made from its head, and released when its answer has been sent
  web/routes/images.py       its fields are checked; the route asks Ledger.admit for room, and submits its images
  engine/ledger.py           all requests and how they end; engine/served.py decides whether a model has room
  engine/thread.py           the engine thread runs the quanta of all models, and reports each to the ledger
  engine/batch.py            one quantum of one model; schedule/scheduler.py says which images are in it
  engine/decode/compiled.py  one call into csrc/; decoder.py does the same in torch, and choice.py chooses
The event loop owns the ledger; the engine thread owns scheduler, slots and decoders. They share nothing, and send each
other the messages of engine/messages.py.

To add
  a route           a function in web/routes/ (a new file needs a line in app.py), its answer in web/schemas.py; every
                    field and parameter needs a description and an example
  a metric          declare it in metrics.py, update it where engine/ledger.py reports, and list it in
                    tests/server/test_dashboard.py
  an attention kind a file in model/attention/ and its line in model/attention/__init__.py, its name in
                    model/config.py, and in compare/backends.py to compare it
"""

"""The service: a map of its packages. Each imports only its own files, base files, and packages below it in this list.

cluster/      several processes that serve as one, on Ray Serve: fronts for HTTP, with a ledger of their own, replicas
              that decode, and a desk with the counts that all fronts need
app, serve    app.py adds routes and middleware to core.py, which decodes; serve.py runs them until a signal ends it
web/          HTTP: requests, admission, answers
  middleware/   checks of every request before its route
  routes/       one file for each group of routes
  requests/     requests of the images routes: their fields, pictures and answers
compare/      the benchmark of attention kinds, live and from the command line
engine/       the engine thread, which decodes the images of all models
  ledger/       admitted requests, from their head to their end, and the room of each model (on the event loop)
  answers/      the images that a request or a command draws, by its options, and which of its candidates are answers
  decode/       one quantum: prefill, decode, and what happens when an image fails; likelihoods between quanta
  schedule/     plain Python: which images wait and run, how long a step takes, when each image will be done
pictures/     uploads in, picture files out: size, orientation, occlusion, photographed digits; uploads are decoded two
              at a time, shared fairly among clients
base          settings, errors, metrics, logs, origins, listening, fault_rules: every package may use these files
static/       the web page, which uses only the API

To follow one request, read these files in this order:
  web/admission.py           makes a ticket when the head is read, and releases it, however the request ends
  web/routes/images.py       has the fields checked, by web/requests/image_request.py and engine/answers/plan.py, and
                             asks Ledger.admit for room
  web/requests/responses.py  submits the images, waits for them, and answers
  engine/ledger/ledger.py    what routes call; local_ledger.py beside it gives requests room if local_model.py has some,
                             and takes the engine thread's reports
  engine/thread.py           the engine thread: runs the quanta of all models, and reports each to the ledger
  engine/batch.py            one quantum of one model; engine/schedule/scheduler.py says which images are in it
  engine/decode/compiled.py  one call through model/packing.py and csrc/ops.cpp; decoder.py beside it does the same in
                             torch, and choice.py selects one
The event loop owns the ledger and the state of comparisons; the engine thread owns scheduler, slots and decoders. Calls
for the thread go through its inbox, and its reports are calls on the event loop (engine/thread.py). What they carry is
in engine/messages.py, and for scores in engine/decode/scoring.py.

Deadlines: engine/ledger/local_model.py refuses one that cannot be met; local_ledger.py beside it sets the timer that
ends a request whose images are not done, ticket.py ends other work for it, and web/middleware/bodies.py the reading.
Failures: engine/decode/failures.py finds an image that fails, and the report of that quantum ends its request.

To add
  a route           a function in web/routes/ (a new file needs a line in app.py), and its answer in web/schemas.py;
                    every field and parameter needs a description and an example. If it has a body, a model for that in
                    web/requests/request_schemas.py, and its path in the tuple JSON, or UPLOADS, of
                    web/middleware/bodies.py. If it needs room in a queue, route_class=AdmittingRoute, and
                    the last part of its path in ENDPOINTS of metrics.py
  an image option   a field in web/fields.py and web/requests/request_schemas.py, a flag in linpix/__main__.py, and a
                    parameter in linpix/cli/draw.py; web/requests/image_request.py, and commands.py and draw.py in
                    linpix/cli/, pass it to engine/answers/plan.py, which checks it, and puts it into ImageSpec.
                    engine/decode/decoder.py keeps it for each slot, and compiled.py passes it on to csrc. If it changes
                    the images, linpix/cli/bulk.py must not continue a run that has another value (_settings there)
  a metric          declare it in metrics.py, update it where it happens: engine/ledger/served_models.py (quanta),
                    engine/ledger/ (requests), web/middleware/ and web/error_handlers.py (HTTP), cluster/ (fronts,
                    desk); and list it in tests/server/test_dashboard.py
  an attention kind a file in model/attention/ and its line in model/attention/__init__.py; its name and options in
                    model/config.py; if it draws, choose in model/packing.py says by which engine, and
                    engine/catalogue.py with how many slots; to compare it, its name in
                    compare/backends.py, in linpix/__main__.py (compare --backends) and in static/race.js
"""

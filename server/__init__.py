"""The service: a map of its packages. Each imports only what is in it, base files, and packages
below it in this list.

cluster/      the same application several times, on Ray Serve: fronts for HTTP, replicas that draw
app, serve    app.py puts models, the engine thread, admission, routes and middleware together;
              serve.py runs them until a signal ends it
web/          HTTP: what requests ask for, uploads, answers
  middleware/   checks of every request before its route
  routes/       one file for each group of routes
compare/      the benchmark of attention kinds, live and from the command line
engine/       admission, on the event loop; and the engine thread, which decodes the images of all
              models
  decode/       one quantum of one model: join, prefill, decode, leave
pictures/     uploads in, picture files out: size, orientation, occlusion, photographed digits,
              likelihoods
base          settings, errors, metrics, logs, origins, listening, memory, fault_rules: every
              package may use these
static/       the web page, which uses only the API

Four kinds of object. A Job is what was asked: checked, frozen, picklable (engine/job.py). A Request
is a job in progress: client, deadline, events, outcome (engine/request.py). An Image is everything
about one image from the queue to its pixels, and a Report is what one quantum did
(engine/image.py). Beside them, an Order is what HTTP asks for, checked and frozen, and an Answer
what sends it (both in web/answers.py); an Event tells the answer what happened to one image.

To follow one request, read these files in this order:
  web/middleware/            connection.py reads its head; stack.py gives it an id, and checks host,
                             origin and key; bodies.py limits its body. serve.py and app.py put them
                             together
  web/routes/images.py       its fields are checked: types and ranges by web/request_schemas.py,
                             what decides pixels by engine/job.py; web/uploads.py decodes an upload.
                             The result is an Order, with all that makes its Job
  web/answers.py             the Answer works when FastAPI sends it: it admits the request, waits
                             for its images, which web/routes/images.py encodes, releases the
                             request, and sends them
  engine/request.py          how every request begins and ends. Its images are drawn by a Drawer: of
                             this process, engine/admission.py; of a front, cluster/remote.py
  engine/admission.py        checks what its client may have, and engine/model.py room in the queue,
                             and time; hands its Images to the engine thread, and turns each Report
                             into events of requests; engine/image.py says which images are drawn
                             again, and which are returned
  engine/thread.py           the engine thread: runs the quanta of all models, and background work
                             between them
  engine/decode/engine.py    one quantum of one model; scheduler.py beside it says which images are
                             in it, prefill.py reads what they know
  engine/decode/compiled.py  one call through model/packing.py and csrc/ops.cpp, or for a GPU
                             model/cuda.py; its base, decoder.py, does the same in torch, and
                             choice.py selects one
The event loop owns admission, requests and comparisons; the engine thread owns scheduler, slots and
decoders. Calls for the thread go through its inbox, and its reports are calls on the event loop.
Images change on the thread, and the loop only reads them until they are done.

Deadlines, in the order of a request: web/middleware/bodies.py ends its reading, web/uploads.py the
decoding of its upload; engine/model.py refuses one that cannot be met, and gives up what waits too
long; engine/admission.py sets the timer that ends it, in a front cluster/remote.py; web/answers.py
ends encoding, and an answer that is not read; web/middleware/connection.py a client that takes
nothing at all. Failures: the decoder names images that are not
finite, engine/decode/failures.py finds the one that makes a quantum raise, prefill.py the one that
cannot be read; the report of that quantum ends their requests. thread.py ends the batch of a
quantum that raises in another way.
"""

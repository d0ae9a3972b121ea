"""The service. A map of its rooms; a room imports only its own files, base files, and rooms above it in this list.

base          settings, errors, metrics, logs, origins, listening, fault_rules: what every room may use
pictures/     uploads in, PNG out: size and orientation, occlusion, and one decoding thread pool shared fairly
engine/       what is admitted (on the event loop), and the thread that decodes it
  schedule/     plain Python: who waits and runs, how long a step takes, when each image will be done
  decode/       one quantum: prefill, decode, and what happens when an image fails
compare/      the benchmark of attention backends, live and from the command line
web/          HTTP: what is asked for, admission, answers
  middleware/   what every request passes before a route
  routes/       one file for each group of routes
cli/          the commands that decode without a server: sample, complete, compare, doctor, key
app, serve    app.py puts routes and middleware together; serve.py runs them until a signal

To follow one request, read web/routes/images.py and web/admission.py (it is read and checked), engine/ledger.py (it
is admitted, reported and released), engine/thread.py and engine/batch.py (its images are decoded, a quantum at a time).
The event loop owns the ledger; the engine thread owns scheduler, slots and decoders; they share nothing, and talk by
engine/messages.py. To add a route, begin with web/routes/operations.py; a metric, metrics.py; an attention kind,
model/attention/.
"""

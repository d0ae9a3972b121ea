"""Tests of server/: those of server/ROOM/FILE.py are in ROOM/test_FILE.py here.

Files without a test of their own name, and where they are tested:
  app, serve, web/routes/models,          test_service.py, web/test_openapi.py
  web/routes/operations
  metrics                                 test_dashboard.py
  cluster/front, cluster/replica          cluster/test_remote.py
  cluster/deployments, cluster/scaling    cluster/test_serve_deploy.py
  compare/backends, compare/checkpoints,  compare/test_comparison.py
  compare/measure
  compare/chart                           compare/test_report.py
  engine/decode/choice,                   engine/decode/test_decoder.py
  engine/decode/compiled
  engine/decode/slots                     engine/decode/test_scheduler.py
  pictures/likelihoods                    web/routes/test_likelihoods.py
  pictures/overlay                        pictures/test_prepare.py
  web/request_schemas, web/uploads        web/test_forms.py
  web/middleware/bodies                   web/test_admission.py
  web/routes/compare                      compare/test_jobs.py, test_service.py

Tests that are not about one file:
  engine/test_conditional.py,             kinds of models in slots
  engine/test_pixels.py
  engine/test_forecast.py                 when images of a model will be done
  engine/test_watchdog.py                 a class of the engine thread
  web/test_attempts.py,                   what a request can ask for
  web/test_candidates.py, web/test_colours.py, web/test_completions.py, web/test_forms.py,
  web/test_images.py, web/test_palettes.py
  web/test_leaving.py                     clients that leave before their answer
  test_traces.py                          what OpenTelemetry records
  web/test_openai.py,                     stock clients; everything that /openapi.json says
  web/test_schemas.py
  test_alerts.py, test_balancer.py,       the files of deploy/, and the container image
  test_deployment.py, cluster/test_deploy.py, cluster/test_serve_deploy.py
"""

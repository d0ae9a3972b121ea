#!/usr/bin/env bash
# Draw an image, watch one being drawn, and complete half of one: curl alone.
set -euo pipefail
images=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}/images
key="authorization: Bearer ${OPENAI_API_KEY:-none}"
json='content-type: application/json'
png='accept: image/png'

# a seven; without "accept: image/png" the answer is JSON, with the picture as base64 in it
curl -sS --fail-with-body "$images/generations" -H "$key" -H "$json" -H "$png" \
     -d '{"model": "mnist-conditional", "label": 7, "size": "280x280"}' -o drawn.png

# each event shows more rows than the one before, the last one the whole image; with one
# attempt no row is drawn again
number=0
curl -sSN --fail-with-body "$images/generations" -H "$key" -H "$json" \
     -d '{"model": "mnist-conditional", "label": 3, "size": "280x280", "stream": true,
          "partial_images": 4, "attempts": 1}' |
  sed -un 's/^data: .*"b64_json": *"\([^"]*\)".*/\1/p' |
  while read -r picture; do
    base64 -d <<<"$picture" >"streamed-$number.png"
    number=$((number + 1))
  done

# keep the upper half of the seven, and have the lower half drawn anew
curl -sS --fail-with-body "$images/edits" -H "$key" -H "$png" -F image=@drawn.png -F keep_rows=14 \
     -F model=mnist-conditional -F label=7 -F size=280x280 -o completed.png

# LinPix in an image: on CPU by default, with CUDA by a build argument.
#
#   docker build --tag linpix .
#   docker build --tag linpix:cuda --build-arg DEVICE=cuda .        then: docker run --gpus all ...
#     (old versions of podman and buildah want --build-arg DEVICE=cpu spelled out as well)
#   docker build --tag linpix:ray --build-arg EXTRAS=ray .          for serve --replicas, and for clusters of Ray
#   docker run --init --read-only --tmpfs /tmp --publish 127.0.0.1:8000:8000 linpix      also: docker run linpix doctor
#
# With DEVICE=cpu torch is a build without CUDA, which is gigabytes smaller: uv knows where torch's makers keep these, since
# pip's own index has none for x86. TORCH_INDEX_URL names another index of torch, INDEX_URL one of everything else.

# an exact version; whoever has pulled and checked it may add the digest: PYTHON_IMAGE=python:...@sha256:...
ARG PYTHON_IMAGE=python:3.11.15-slim-bookworm
# has nvcc; of the CUDA major version that torch was built with (torch.version.cuda). DEVICE=cpu does not fetch it
ARG CUDA_IMAGE=nvidia/cuda:13.0.3-devel-ubuntu24.04
ARG DEVICE=cpu

FROM ${PYTHON_IMAGE} AS toolkit-cpu
RUN mkdir /toolkit

FROM ${CUDA_IMAGE} AS toolkit-cuda
RUN mkdir /toolkit && cp --archive "$(readlink --canonicalize /usr/local/cuda)" /toolkit/cuda

FROM toolkit-${DEVICE} AS toolkit

# --- everything is fetched and compiled here; only /opt/venv and /opt/linpix leave this stage ---
FROM ${PYTHON_IMAGE} AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
COPY --from=toolkit /toolkit/ /usr/local/
ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 UV_NO_CACHE=1
RUN python -m venv /opt/venv
WORKDIR /src

# torch first, and every later install is held to it: nothing pulls another one
ARG DEVICE
ARG TORCH_SPEC=torch==2.13.0
ARG TORCH_INDEX_URL=
ARG INDEX_URL=
RUN index="${TORCH_INDEX_URL:-$INDEX_URL}" \
 && if [ "$DEVICE" = cpu ] && [ -z "$index" ]; \
    then pip install --target /opt/uv uv && /opt/uv/bin/uv pip install --torch-backend cpu "$TORCH_SPEC"; \
    else pip install ${index:+--index-url "$index"} "$TORCH_SPEC"; fi \
 && python -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" > /opt/constraints.txt \
 && python -c "import sys, torch; sys.exit('$DEVICE' == 'cuda' and not torch.version.cuda and f'DEVICE=cuda, but torch {torch.__version__} has no CUDA: change TORCH_INDEX_URL')"

# the dependencies next, so that a change of our code does not fetch them again. EXTRAS: of pyproject.toml, with spaces
ARG EXTRAS=
COPY pyproject.toml ./
RUN python -c "import tomllib; all = tomllib.load(open('pyproject.toml', 'rb')); extras = [all['project']['optional-dependencies'][name] for name in '$EXTRAS'.split()]; print(*all['build-system']['requires'], *all['project']['dependencies'], *sum(extras, []), sep='\n')" > /opt/requirements.txt \
 && pip install ${INDEX_URL:+--index-url "$INDEX_URL"} --constraint /opt/constraints.txt --requirement /opt/requirements.txt

# without isolation: the kernels are compiled against the torch above, and the build fetches no other
COPY . .
RUN pip install --no-deps --no-build-isolation .

# what nothing here runs: torch's own tests, its headers and compilers of protocols, and pip
RUN torch="$(python -c "import torch; print(torch.__path__[0])")" \
 && rm -rf "$torch/test" "$torch/include" "$torch/share" "$torch"/bin/protoc* \
 && pip uninstall --yes pip

# files of a checkout may be private to their owner; here everybody may read them
COPY checkpoints /opt/linpix/checkpoints
RUN chmod -R a+rX /opt/linpix

# --- what runs: no compiler, nobody special, and nothing that it would write to but /tmp ---
FROM ${PYTHON_IMAGE}
RUN groupadd --gid 10001 linpix \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin linpix
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/linpix /opt/linpix
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    OMP_WAIT_POLICY=PASSIVE \
    LINPIX_HOST=0.0.0.0 \
    LINPIX_PORT=8000 \
    LINPIX_CHECKPOINTS=/opt/linpix/checkpoints
WORKDIR /opt/linpix
USER 10001:10001
EXPOSE 8000

# it asks the sockets that the server has opened, so it follows all flags and variables
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import sys; from linpix.server.listening import is_ready; sys.exit(not is_ready())"]

# no shell in between: SIGTERM reaches the server, which finishes what it has begun (LINPIX_DRAIN_TIMEOUT, 30 s)
STOPSIGNAL SIGTERM
ENTRYPOINT ["linpix"]
CMD ["serve"]

# syntax=docker/dockerfile:1
# docker build -t chairlift . && docker run --rm -p 8000:8000 chairlift
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS builder
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
# For a machine without a GPU, TORCH_INDEX=https://download.pytorch.org/whl/cpu makes an image a fraction of the size.
ARG TORCH_INDEX=https://pypi.org/simple
ARG TORCH_VERSION=2.13.0
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" --extra-index-url https://pypi.org/simple "torch==${TORCH_VERSION}"
RUN --mount=type=bind,from=builder,source=/wheels,target=/wheels pip install --no-cache-dir /wheels/*.whl
# Asks the server on CHAIRLIFT_PORT, over TLS if it has no plain answer. Who is sent away after a handshake lacks a
# client's certificate: then somebody listens, and that is all there is to know.
COPY --chmod=755 <<'EOF' /usr/local/bin/chairlift-ready
import http.client
import os
import ssl
import sys

place = "127.0.0.1", int(os.environ.get("CHAIRLIFT_PORT") or 8000)


def is_ready(connection):
    connection.request("GET", "/health/ready")
    return connection.getresponse().status == 200


try:
    ready = is_ready(http.client.HTTPConnection(*place, timeout=1.5))
except (OSError, http.client.HTTPException):
    encrypted = http.client.HTTPSConnection(*place, timeout=1.5, context=ssl._create_unverified_context())
    encrypted.connect()
    try:
        ready = is_ready(encrypted)
    except (ssl.SSLError, ConnectionError):
        ready = True
sys.exit(not ready)
EOF
RUN useradd --create-home --uid 10001 chairlift
# A new volume that is mounted here takes on its owner.
RUN install -d -o 10001 -g 10001 -m 700 /data
# By number, for where a user must be seen not to be root.
USER 10001
WORKDIR /home/chairlift
# The image is no good without its kernels, whose OpenMP is torch's.
RUN python -c "from chairlift.ops.native import load_library; load_library()"
ENV CHAIRLIFT_HOST=0.0.0.0 HF_HUB_CACHE=/data/hub XDG_CACHE_HOME=/data/cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 CMD ["python", "/usr/local/bin/chairlift-ready"]
ENTRYPOINT ["chairlift"]
CMD ["serve"]

# syntax=docker/dockerfile:1
# docker build -t chairlift . && docker run --rm -p 8000:8000 chairlift
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS builder
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
# Process 1 has to wait for what others leave behind, such as what a model's code has started: the server does not.
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
# For a machine without a GPU, TORCH_INDEX=https://download.pytorch.org/whl/cpu makes an image a fraction of the size.
ARG TORCH_INDEX=https://pypi.org/simple
ARG TORCH_VERSION=2.13.0
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" --extra-index-url https://pypi.org/simple "torch==${TORCH_VERSION}"
RUN --mount=type=bind,from=builder,source=/wheels,target=/wheels pip install --no-cache-dir /wheels/*.whl
# Asks the server where the first process that does listens, process 1 or one below it, as process 1 is an init: the port
# may be set by a flag, a variable or a file. Where that can't be told, CHAIRLIFT_PORT is asked. Over TLS if there is no plain answer; who is sent
# away after a handshake lacks a client's certificate: then somebody listens, and that is all there is to know.
COPY --chmod=755 <<'EOF' /usr/local/bin/chairlift-ready
import contextlib
import http.client
import os
import socket
import ssl
import sys
from pathlib import Path


def listens_at(process):
    own, places = set(), []
    for each in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            own.add(os.readlink(each))
    for family, name in (socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6"):
        path = Path(f"/proc/{process}/net/{name}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == "0A" and f"socket:[{inode}]" in own:
                host, port = map(bytes.fromhex, local.split(":"))
                # Words of four bytes, the last one first.
                address = b"".join(host[i : i + 4][::-1] for i in range(0, len(host), 4))
                places.append((socket.inet_ntop(family, address), int.from_bytes(port, "big")))
    return places


def find_places(process):
    found = [process]
    for each in found:
        with contextlib.suppress(OSError):
            if places := listens_at(each):
                return places
            found += Path(f"/proc/{each}/task/{each}/children").read_text().split()
    return [("127.0.0.1", int(os.environ.get("CHAIRLIFT_PORT") or 8000))]


def ask(connection):
    connection.request("GET", "/health/ready", headers={"Host": "127.0.0.1"})
    return connection.getresponse().status == 200


def is_ready(place):
    try:
        return ask(http.client.HTTPConnection(*place, timeout=1.5))
    except (OSError, http.client.HTTPException):
        context = ssl._create_unverified_context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    encrypted = http.client.HTTPSConnection(*place, timeout=1.5, context=context)
    try:
        encrypted.connect()
    except OSError:
        return None
    if encrypted.sock.selected_alpn_protocol() == "h2":
        return None  # that is gRPC
    try:
        return ask(encrypted)
    except (ssl.SSLError, ConnectionError):
        return True


found = {is_ready(place) for place in find_places(*sys.argv[1:] or ["1"])}
sys.exit(True not in found or False in found)
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
ENTRYPOINT ["tini", "--", "chairlift"]
CMD ["serve"]

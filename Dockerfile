# Two images from one file; torch is only in the second.
#
#   docker build --target server -t cotrain-server .     the API and the scheduler
#   docker build --target worker -t cotrain-worker .     the engine
#
# Which torch: the version stands in constraints.txt, the build comes from TORCH_INDEX_URL (CPU by
# default; empty takes PyPI's CUDA build) or from a wheel in docker/wheels. The CUDA wheels carry
# their own libraries, so the base image needs only Python; the driver comes from the host through
# the NVIDIA container toolkit. No BuildKit feature is used: any builder will do.
ARG PYTHON_IMAGE=python:3.11-slim

# ── what both are built with ─────────────────────────────────────────────────────────────────────
FROM ${PYTHON_IMAGE} AS build
# A mirror of PyPI, where there is one.
ARG PIP_INDEX_URL
ENV PATH=/opt/cotrain/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
# --only-deps came with pip 26.3.
RUN python3 -m venv /opt/cotrain && pip install --quiet "pip>=26.3"
COPY docker/wheels /wheels
COPY pyproject.toml ./
# Dependencies before sources, so that a change of code does not fetch torch again.
RUN touch README.md LICENSE

FROM build AS wheel
COPY . ./
RUN pip wheel --quiet --no-deps --wheel-dir /dist .

FROM build AS server-packages
RUN pip install --find-links /wheels --constraint constraints.txt --only-deps ".[server]"

# ── what both run on ─────────────────────────────────────────────────────────────────────────────
FROM ${PYTHON_IMAGE} AS runtime
# Owned by the user, so that a fresh volume mounted there is writable; nothing else is written to.
RUN groupadd --gid 10001 cotrain \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin cotrain \
 && mkdir -p /data /models && chown 10001:10001 /data
ENV PATH=/opt/cotrain/bin:$PATH \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TQDM_DISABLE=1 \
    COTRAIN_DATA_DIR=/data HF_HOME=/data/huggingface
WORKDIR /data
USER 10001:10001

# ── API and scheduler ────────────────────────────────────────────────────────────────────────────
FROM server-packages AS server-installed
COPY --from=wheel /dist /dist
RUN pip install --no-deps --no-index /dist/*.whl

FROM runtime AS server
COPY --from=server-installed /opt/cotrain /opt/cotrain
EXPOSE 8000
CMD ["python", "-m", "cotrain_server"]

# ── engine ───────────────────────────────────────────────────────────────────────────────────────
FROM build AS worker-packages
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
# torch first and alone: only torch may come from that index, and its layer outlives other changes.
RUN pip install --find-links /wheels ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} \
    --constraint constraints.txt --no-deps torch
RUN pip install --find-links /wheels --constraint constraints.txt --only-deps ".[workers]"

FROM worker-packages AS worker-installed
COPY --from=wheel /dist /dist
RUN pip install --no-deps --no-index /dist/*.whl

FROM runtime AS worker
# A GPU needs a C compiler here: torch compiles what launches its small fused kernels.
ARG WORKER_PACKAGES=""
USER root
RUN if [ -n "$WORKER_PACKAGES" ]; then \
      apt-get update && apt-get install --yes --no-install-recommends $WORKER_PACKAGES \
      && rm -rf /var/lib/apt/lists/*; \
    fi
USER 10001:10001
COPY --from=worker-installed /opt/cotrain /opt/cotrain
CMD ["python", "-m", "cotrain_workers"]

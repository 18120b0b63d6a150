# Four images. Only the second contains torch.
#
#   docker build --target server -t cotrain-server .     the API and the scheduler
#   docker build --target worker -t cotrain-worker .     the engine
#   docker build --target redis -t cotrain-redis .       Redis, with our settings and an unprivileged user
#   docker build --target edge -t cotrain-edge .         HAProxy with our settings, in front of the API
#
# Every package except torch is checked against pins/hashes.txt. Libraries of a CUDA build other than PyPI's
# have other versions. PINS=constraints.txt installs them unchecked.
#
# constraints.txt has the version of torch. Its build comes from TORCH_INDEX_URL (CPU by default; PyPI's CUDA
# build if empty) or from a wheel in docker/wheels. The CUDA wheels contain their own libraries, so the base
# image needs only Python. The driver comes from the host through the NVIDIA container toolkit. Any builder
# works, because no BuildKit feature is used.
ARG PYTHON_IMAGE=python:3.11-slim
ARG REDIS_IMAGE=valkey/valkey:8.1
ARG HAPROXY_IMAGE=haproxy:3.2

# ── Redis ────────────────────────────────────────────────────────────────────────────────────────
FROM ${REDIS_IMAGE} AS redis
COPY docker/redis /etc/cotrain
# Owned by the user, so that fresh volumes mounted there are writable. Not /data: the base image declares it
# a volume, and some builders discard changes to a volume.
RUN mkdir -p /redis /secret && chown 10001:10001 /redis /secret && chmod 0700 /redis /secret
WORKDIR /redis
USER 10001:10001
ENTRYPOINT ["/bin/sh", "/etc/cotrain/start.sh"]
CMD []

# ── edge ─────────────────────────────────────────────────────────────────────────────────────────
FROM ${HAPROXY_IMAGE} AS edge
COPY docker/edge /etc/cotrain
USER 10001:10001
ENTRYPOINT ["haproxy", "-W", "-db", "-f", "/etc/cotrain/haproxy.cfg"]
CMD []

# ── build environment of both ─────────────────────────────────────────────────────────────────────
FROM ${PYTHON_IMAGE} AS build
# Optional mirror of PyPI.
ARG PIP_INDEX_URL
ARG PINS=pins/hashes.txt
# Later stages inherit ENV. Each of them must repeat an ARG.
ENV PATH=/opt/cotrain/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PINS=$PINS
WORKDIR /src
COPY constraints.txt ./
COPY pins ./pins
RUN python3 -m venv /opt/cotrain && pip install --quiet --require-hashes --requirement pins/pip.txt
COPY docker/wheels /wheels
# Dependencies before sources, so that a change of code does not fetch torch again.
COPY pyproject.toml ./
RUN python pins/requirements_of.py server objects otel >server.txt \
 && python pins/requirements_of.py workers objects otel >workers.txt

FROM build AS wheel
ARG PIP_INDEX_URL
COPY . ./
# The build backend is checked by hash, too. pip does so only for packages that are installed beforehand.
RUN echo hatchling >build.txt \
 && pip install --quiet --constraint $PINS --requirement build.txt \
 && pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /dist .

FROM build AS server-packages
ARG PIP_INDEX_URL
RUN pip install --find-links /wheels --constraint $PINS --requirement server.txt

# ── what both run on ─────────────────────────────────────────────────────────────────────────────
FROM ${PYTHON_IMAGE} AS runtime
# Owned by the user, so that a fresh volume mounted there is writable. Processes write nowhere else.
RUN groupadd --gid 10001 cotrain \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin cotrain \
 && mkdir -p /data /models /secret && chown 10001:10001 /data /secret
ENV PATH=/opt/cotrain/bin:$PATH \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TQDM_DISABLE=1 \
    COTRAIN_DATA_DIR=/data HF_HOME=/data/huggingface HF_HUB_DISABLE_TELEMETRY=1
WORKDIR /data
USER 10001:10001

# ── API and scheduler ────────────────────────────────────────────────────────────────────────────
FROM server-packages AS server-installed
COPY --from=wheel /dist /dist
RUN pip install --no-deps --no-index /dist/*.whl

FROM runtime AS server
# Neither the API nor the scheduler multiplies matrices. Without this, numpy keeps a thread per core for it.
ENV OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 RAYON_NUM_THREADS=2
COPY --from=server-installed /opt/cotrain /opt/cotrain
EXPOSE 8000
CMD ["python", "-m", "cotrain_server"]

# ── engine ───────────────────────────────────────────────────────────────────────────────────────
FROM build AS worker-packages
ARG PIP_INDEX_URL
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
# torch comes first and alone. Only torch may come from that index, and its layer survives other changes.
RUN pip install --find-links /wheels ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} \
    --constraint constraints.txt --no-deps torch
RUN pip install --find-links /wheels --constraint $PINS --requirement workers.txt

FROM worker-packages AS worker-installed
COPY --from=wheel /dist /dist
RUN pip install --no-deps --no-index /dist/*.whl

FROM runtime AS worker
# Threads that wait for one another yield their cores to other processes soon, as under `cotrain serve`.
ENV GOMP_SPINCOUNT=10000
# On a GPU a C compiler is needed, because Triton compiles the launchers of its kernels.
ARG WORKER_PACKAGES=""
USER root
RUN if [ -n "$WORKER_PACKAGES" ]; then \
      apt-get update && apt-get install --yes --no-install-recommends $WORKER_PACKAGES \
      && rm -rf /var/lib/apt/lists/*; \
    fi
USER 10001:10001
COPY --from=worker-installed /opt/cotrain /opt/cotrain
CMD ["python", "-m", "cotrain_workers"]

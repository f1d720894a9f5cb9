# Meshwright for CPUs (docker build .), or for GPUs with another base and torch's build for it (make docker-cuda).
# Both stages have the same base, so that the environment made in the first finds its Python in the second.
ARG BASE=debian:trixie-slim

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv
RUN python3 -m venv /opt/meshwright
WORKDIR /src
COPY constraints.txt ./
# Before the sources: a change of those does not fetch it again.
RUN /opt/meshwright/bin/pip install --no-cache-dir --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" torch
COPY pyproject.toml README.md LICENSE ./
COPY recipes recipes
COPY meshwright meshwright
RUN /opt/meshwright/bin/pip install --no-cache-dir --constraint constraints.txt '.[train]'

FROM ${BASE}
# For GPUs "g++ python3-dev": Triton and torch.compile call a compiler.
ARG PACKAGES=""
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 ${PACKAGES} \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 meshwright \
    && install --directory --owner meshwright /workspace
COPY --from=build /opt/meshwright /opt/meshwright
ENV PATH=/opt/meshwright/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /workspace
ENTRYPOINT ["meshwright"]
CMD ["--help"]

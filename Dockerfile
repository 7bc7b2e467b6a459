# megarl on CPUs; the steps are those of `make install` (README.md).
#
#   docker build -t megarl .
#   docker run --rm -v "$PWD/runs:/data/runs" megarl train grpo_quickstart --dry-run
#   docker run --rm --shm-size 2g -v "$PWD/runs:/data/runs" megarl train grpo_quickstart
#
# Runs are written below /data, as the user 1000: let that user write to what is mounted there.
FROM python:3.11-slim-bookworm

# Without a GPU: torch's CPU builds instead of several GB of CUDA libraries.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# g++ compiles the kernels for this processor when they are first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/megarl
COPY constraints.txt ./
# torch comes first, by itself: resolved together with the rest, pip may choose another build.
RUN python -m pip install "$(grep '^torch==' constraints.txt)"
COPY . .
RUN python -m pip install -c constraints.txt -e .

RUN useradd --create-home --uid 1000 megarl && mkdir /data && chown megarl /data
USER 1000
WORKDIR /data
ENTRYPOINT ["megarl"]
CMD ["doctor"]

# One image for every process: `bargein control`, `bargein stage`, ... What it runs is chosen by the command.
#   docker build -t bargein .                      without PyTorch
#   docker build -t bargein --build-arg TORCH=1 .  with PyTorch, as the index offers it (gigabytes on Linux)

FROM python:3.11.13-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/build /opt/bargein
COPY requirements.lock requirements-build.lock ./
RUN /opt/bargein/bin/pip install --require-hashes --only-binary :all: -r requirements.lock \
 && /opt/build/bin/pip install --require-hashes --only-binary :all: -r requirements-build.lock
ARG TORCH=0
RUN if [ "$TORCH" = 1 ]; then /opt/bargein/bin/pip install torch==2.13.0; fi
COPY pyproject.toml README.md LICENSE ./
COPY control control
COPY stages stages
COPY workers workers
COPY clients/python/bargein_client clients/python/bargein_client
# Built apart from where it is installed, so that no build tool reaches the image.
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --no-index --wheel-dir dist . \
 && /opt/bargein/bin/pip install --no-deps --no-index dist/*.whl \
 && cp -r clients/python/bargein_client /opt/bargein/lib/python3.11/site-packages/ \
 && /opt/bargein/bin/python -m compileall -q /opt/bargein/lib \
 && /opt/bargein/bin/pip uninstall -q -y pip

FROM python:3.11.13-slim-bookworm
RUN useradd --system --uid 10001 --home-dir /nonexistent --shell /usr/sbin/nologin bargein
COPY --from=build /opt/bargein /opt/bargein
COPY deploy/pipelines/demo-parrot.yaml /etc/bargein/pipeline.yaml
ENV PATH=/opt/bargein/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER bargein
STOPSIGNAL SIGTERM
ENTRYPOINT ["bargein"]
CMD ["--help"]

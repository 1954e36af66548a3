# `vqprompt serve` as a container: without PyTorch, which teaching at effort instant and asking do not need.
#   docker build -t vqprompt . && docker run -p 8000:8000 -e VQPROMPT_TOKEN=… -v models:/models vqprompt
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY vqprompt vqprompt
RUN python -m venv /opt/vqprompt && /opt/vqprompt/bin/pip install --no-cache-dir ".[serve]"

FROM python:3.12-slim
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin vqprompt && install -d -o 10001 -g 10001 /models
COPY --from=build /opt/vqprompt /opt/vqprompt
ENV PATH=/opt/vqprompt/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    VQPROMPT_HOME=/tmp/vqprompt \
    VQPROMPT_SERVE_HOST=0.0.0.0
USER 10001:10001
WORKDIR /models
VOLUME /models
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/live', timeout=4)"]
STOPSIGNAL SIGTERM
# a server that other machines can reach refuses to start without VQPROMPT_TOKEN
ENTRYPOINT ["vqprompt"]
CMD ["serve", "/models/model.vqp"]

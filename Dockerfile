# The demo in a container: docker build -t gradwire . && docker run --rm gradwire
# Virtual hosts need rights that a container has only with --privileged; without them the demo says so and uses memory.
FROM python:3.12-slim-bookworm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make iproute2 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /gradwire
COPY . .
RUN make setup
CMD ["make", "demo"]

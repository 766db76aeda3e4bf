# docker build -t convoy .
# docker run -p 8000:8000 -v $PWD/store:/store:ro -e CONVOY_STORE=/store convoy
#
# Without a store the bundled demo is served. The base needs Python 3.11 to 3.13 with venv and pip.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
RUN python3 -m venv /opt/convoy
COPY constraints.txt pyproject.toml README.md convoy.py /src/
COPY app /src/app
COPY export /src/export
COPY models /src/models
COPY loadtest /src/loadtest
RUN /opt/convoy/bin/pip install --no-cache-dir --disable-pip-version-check \
    --constraint /src/constraints.txt "/src[cpu]" \
    && /opt/convoy/bin/pip uninstall --yes pip

FROM ${BASE} AS cpu
COPY --from=build /opt/convoy /opt/convoy
# A user of its own; the number is fixed so that volumes can be owned by it.
RUN echo "convoy:x:10001:10001::/home/convoy:/usr/sbin/nologin" >> /etc/passwd \
    && mkdir -p /home/convoy && chown 10001:10001 /home/convoy
USER 10001
WORKDIR /home/convoy
ENV PATH=/opt/convoy/bin:$PATH PYTHONDONTWRITEBYTECODE=1
EXPOSE 8000 8001
# The ready route, not the port: a server whose engine hangs still listens.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["python3", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ.get('CONVOY_PORT', '8000') + '/v2/health/ready', timeout=2)"]
ENTRYPOINT ["convoy"]
CMD ["serve"]

# docker build -t convoy .
# docker run --gpus all -p 8000:8000 -p 8001:8001 -v $PWD/store:/store:ro -v convoy-cache:/cache convoy
#
# Without a mounted store the bundled demo is served; without a GPU the CPU serves, and says why. Other builds:
#   --target rtx                TensorRT for RTX alone, for GPUs: a fifth of the libraries, with plans inside
#   --target cpu                for machines without a GPU: a tenth of the libraries
#   --build-arg NVIDIA_INDEX=   without TensorRT, where NVIDIA's package index cannot be reached
#   --build-arg BASE=IMAGE      any image with Python 3.11 to 3.13 and venv, and the C library of Debian 12 or newer
ARG BASE=python:3.13-slim-bookworm


# What is installed, by how often it changes. None of these stages is shipped.

FROM ${BASE} AS python
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The base's own pip installs nothing but this one: Debian 12's is too old to match a package that is asked for with an
# extra, such as `pydantic[email]`, with its hash.
COPY locks/pip.txt /src/locks/
RUN python3 -m venv /opt/libraries \
    && /opt/libraries/bin/pip install --require-hashes --requirement /src/locks/pip.txt

FROM python AS requirements
# `make lock` writes these, with the hash of every file that may be installed.
COPY locks /src/locks

# Who serves never opens what installs, ONNX Runtime once more for programs in C, numpy's tests, simdjson's source, and of
# the descriptions of Amazon's 400 services all but those of a store and of signing in to it.
RUN printf '%s\n' 'set -e' \
        '/opt/libraries/bin/pip uninstall --yes pip setuptools' \
        'cd /opt/libraries/lib/python*/site-packages' \
        'rm -r onnxruntime/capi/libonnxruntime.so.* simdjson/simdjson.*' \
        'find numpy -path "*/tests/*" -delete' \
        'cd botocore/data' \
        'find * -maxdepth 0 -type d | grep -vxE "s3|sts|sso|sso-oidc|signin" | xargs rm -r' \
        > /src/finish.sh

FROM requirements AS cpu-installed
RUN /opt/libraries/bin/pip install --require-hashes --requirement /src/locks/cpu.txt

FROM cpu-installed AS cpu-libraries
RUN sh /src/finish.sh

FROM cpu-installed AS rtx-libraries
RUN /opt/libraries/bin/pip install --require-hashes --requirement /src/locks/rtx.txt && sh /src/finish.sh

FROM requirements AS gpu-libraries
RUN /opt/libraries/bin/pip install --require-hashes --requirement /src/locks/gpu.txt
# From an index that gives no hashes.
COPY constraints.txt /src/
ARG NVIDIA_INDEX=https://pypi.nvidia.com
RUN if [ -n "${NVIDIA_INDEX}" ]; then \
        /opt/libraries/bin/pip install --constraint /src/constraints.txt --extra-index-url "${NVIDIA_INDEX}" \
            tensorrt-cu13; \
    fi \
    && sh /src/finish.sh

FROM python AS code
COPY constraints.txt /src/
RUN /opt/libraries/bin/pip install --constraint /src/constraints.txt setuptools
COPY LICENSE README.md pyproject.toml /src/
COPY convoy /src/convoy
COPY app /src/app
COPY export /src/export
COPY loadtest /src/loadtest
COPY models /src/models
RUN /opt/libraries/bin/pip install --no-deps --no-build-isolation --target /opt/convoy /src


# What is shipped: the libraries above, the code above them, and a user who can write nothing but the plan cache.

FROM ${BASE} AS server
# The number is fixed, so that what is mounted can be made to belong to it.
RUN echo "convoy:x:10001:10001::/home/convoy:/usr/sbin/nologin" >> /etc/passwd \
    && echo "convoy:x:10001:" >> /etc/group \
    && mkdir -p /home/convoy /cache \
    && chown 10001:10001 /home/convoy /cache
# Served until a store is mounted over it.
COPY models/demo /store
ENV PATH=/opt/convoy/bin:/opt/libraries/bin:${PATH} \
    PYTHONPATH=/opt/convoy \
    PYTHONDONTWRITEBYTECODE=1 \
    ORT_DISABLE_TELEMETRY=1 \
    CONVOY_STORE=/store \
    CONVOY_PLAN_CACHE=/cache \
    CONVOY_STORE_CACHE=/cache/store \
    CONVOY_ADDRESS_FILE=/tmp/convoy-address
USER 10001:10001
WORKDIR /home/convoy
EXPOSE 8000 8001
# Asks where the server says that it listens, also with `serve --port 9000`.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python3", "-m", "convoy.app.commands.healthcheck"]
ENTRYPOINT ["convoy"]
CMD ["serve"]

FROM server AS cpu
COPY --from=cpu-libraries /opt/libraries /opt/libraries
COPY --from=code /opt/convoy /opt/convoy

# The driver comes from the host, by NVIDIA's container runtime.
FROM server AS gpu-server
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM gpu-server AS rtx
COPY --from=rtx-libraries /opt/libraries /opt/libraries
COPY --from=code /opt/convoy /opt/convoy
# Its plans need no GPU to be built: a container that starts on one has the demo's already.
RUN convoy build digits

# The last one is what a build without --target makes.
FROM gpu-server AS gpu
COPY --from=gpu-libraries /opt/libraries /opt/libraries
COPY --from=code /opt/convoy /opt/convoy

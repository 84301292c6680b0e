# CPU:  docker build --target cpu -t hybrid-imagenet:cpu .
# GPU:  docker build --target gpu -t hybrid-imagenet:gpu .      (the host needs the NVIDIA container toolkit)
#       with --build-arg GPU=v100 for GPUs before Turing (P100, P40, V100), which need an older cuDNN
#
# Both are built by launch/setup.sh, like an environment outside a container; launch/docker.sh builds and runs them.
# Ranks on several hosts reach each other over an sshd that runs without root: see the user's files at the end.

ARG DEBIAN=python:3.11-slim-bookworm
ARG CUDA=nvidia/cuda:12.9.1-devel-ubuntu24.04
ARG UBUNTU=ubuntu:24.04

# The compilers stay in the build stages; only the finished environment leaves them. What setup.sh reads comes first, so
# that a change of the program does not build everything again.
FROM ${DEBIAN} AS cpu-build
# hadolint ignore=DL3008  # the base image pins the distribution; exact versions vanish from its mirrors
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ make openssh-client \
 && rm -rf /var/lib/apt/lists/*
ENV HYBRID_IMAGENET_VENV=/opt/venv OMPI_MCA_btl_vader_single_copy_mechanism=none PIP_NO_CACHE_DIR=1
WORKDIR /opt/hybrid_imagenet
COPY setup.py pyproject.toml README.md LICENSE NOTICE ./
COPY hybrid_imagenet/__init__.py hybrid_imagenet/
COPY launch launch
RUN launch/setup.sh --cpu && rm -rf /root/.cache

FROM ${CUDA} AS gpu-build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ make openssh-client python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
ENV HYBRID_IMAGENET_VENV=/opt/venv OMPI_MCA_btl_vader_single_copy_mechanism=none PIP_NO_CACHE_DIR=1
WORKDIR /opt/hybrid_imagenet
COPY setup.py pyproject.toml README.md LICENSE NOTICE ./
COPY hybrid_imagenet/__init__.py hybrid_imagenet/
COPY launch launch
ARG GPU=a100
RUN launch/setup.sh --gpu=${GPU} && rm -rf /root/.cache

FROM ${DEBIAN} AS cpu-base
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends openssh-client openssh-server \
 && rm -rf /var/lib/apt/lists/*

# TensorFlow's wheels bring CUDA's libraries, so that the GPU image needs no CUDA of its own: the driver comes from outside.
# Without the verbs libraries NCCL would go by TCP, and say so at NCCL_DEBUG=INFO only.
FROM ${UBUNTU} AS gpu-base
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends openssh-client openssh-server python3 \
   libibverbs1 ibverbs-providers librdmacm1 \
 && rm -rf /var/lib/apt/lists/* \
 && { userdel --remove ubuntu 2>/dev/null || true; }
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM cpu-base AS cpu
COPY --from=cpu-build /opt/venv /opt/venv
COPY . /opt/hybrid_imagenet
RUN chmod -R a+rX /opt/hybrid_imagenet && /opt/hybrid_imagenet/launch/container_user.sh
# Containers may not read each other's memory, which Open MPI's shared-memory transport would try.
ENV HYBRID_IMAGENET_VENV=/opt/venv OMPI_MCA_btl_vader_single_copy_mechanism=none PATH=/opt/hybrid_imagenet/launch:/opt/venv/bin:$PATH
USER 1000
WORKDIR /workspace
CMD ["local.sh"]

FROM gpu-base AS gpu
COPY --from=gpu-build /opt/venv /opt/venv
COPY . /opt/hybrid_imagenet
RUN chmod -R a+rX /opt/hybrid_imagenet && /opt/hybrid_imagenet/launch/container_user.sh
ENV HYBRID_IMAGENET_VENV=/opt/venv OMPI_MCA_btl_vader_single_copy_mechanism=none PATH=/opt/hybrid_imagenet/launch:/opt/venv/bin:$PATH
USER 1000
WORKDIR /workspace
CMD ["local.sh"]

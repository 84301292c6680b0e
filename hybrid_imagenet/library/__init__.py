"""The parts for Keras models of other programs (docs/library.md); its import registers this package's classes."""

from hybrid_imagenet.library import loading as _loading  # noqa: F401

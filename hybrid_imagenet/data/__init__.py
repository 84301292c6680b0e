"""Data sets: sources of encoded images, their order, decoding and augmentation."""

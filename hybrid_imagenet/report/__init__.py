"""Reports of finished or running trainings: `python -m hybrid_imagenet.report RUN [RUN ...]`."""

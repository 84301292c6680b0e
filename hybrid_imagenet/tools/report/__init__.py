"""Reports of finished or running trainings: `hybrid-imagenet report RUN [RUN ...]`."""

"""Thin commands over the pipeline: `python -m jobs.generate --config FILE`."""

import pipeline as pipeline  # first of all: it settles what ray.data reads as it is imported

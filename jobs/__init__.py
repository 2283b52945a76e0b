"""Thin commands over the pipeline: `python -m jobs.generate --config FILE`."""

"""The commands: thin, over pipeline and esp_worker."""

import pipeline as pipeline  # first of all: it settles what ray.data reads as it is imported

"""The decoder: ESP (embedding-space probing) and plain decoding on stock Hugging Face models, in batched slots.

Knows nothing of Ray, files, datasets or chat templates. See `engine.Engine` for the step loop and `reference` for the
specification it must equal.
"""

"""The pipeline: prompts in, generations out, on Ray Data. `graph.generate` is the composable call; see README."""

"""The pipeline: prompts in, generations out, on Ray Data. `graph.generate` is the composable call; see README."""

import os

# Before ray.data is imported, which reads it then. A driver that was killed keeps its claim on the cluster's CPUs for
# so long (Ray's own: 180 s), and meanwhile the next one's decoders work while its writers wait for a CPU.
os.environ.setdefault("RAY_DATA_AUTOSCALING_REQUEST_EXPIRE_TIME_S", "30")

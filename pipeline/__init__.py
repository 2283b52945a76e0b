"""The Ray Data pipeline: reads prompts, prepares them, decodes them in a pool of actors, writes shards, reports."""

import os

# Before ray.data is imported, which reads it then. A driver that was killed keeps its claim on the cluster's CPUs for so
# long (Ray's own: 180 s), and meanwhile the next one's decoders work while its writers wait for a CPU.
os.environ.setdefault("RAY_DATA_AUTOSCALING_REQUEST_EXPIRE_TIME_S", "30")

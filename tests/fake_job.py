"""jobs.generate with the fake decoder, in a process of its own: python tests/fake_job.py LOG SECONDS --config FILE

LOG: a folder for the decoder's events, or `instant` for the decoder that does nothing of its own.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from fake_decoder import FakeDecoder, InstantDecoder

from jobs.generate import main

if __name__ == "__main__":
    log, seconds, *arguments = sys.argv[1:]
    fake = InstantDecoder if log == "instant" else partial(FakeDecoder, log=Path(log), seconds=float(seconds))
    sys.exit(main(arguments, decoder=fake))

"""jobs.generate with the fake decoder, in a process of its own: python tests/fake_job.py LOG SECONDS --config FILE"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from fake_decoder import FakeDecoder

from jobs.generate import main

if __name__ == "__main__":
    log, seconds, *arguments = sys.argv[1:]
    sys.exit(main(arguments, decoder=partial(FakeDecoder, log=Path(log), seconds=float(seconds))))

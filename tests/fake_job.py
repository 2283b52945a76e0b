"""jobs.generate with a decoder of the tests, in a process of its own: python tests/fake_job.py LOG TAKES --config FILE

LOG: a folder for the decoder's events, or `instant` for the decoder that does nothing of its own. TAKES: seconds a row,
or `real` for the real decoder with a log.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fake_decoder import FakeDecoder, InstantDecoder, LoggedDecoder

from jobs.generate import main
from pipeline.decoder import Decoder
from pipeline.plan import Plan


def chosen(log: str, takes: str) -> Callable[[Plan], Decoder]:
    if log == "instant":
        return InstantDecoder
    if takes == "real":
        return partial(LoggedDecoder, log=Path(log))
    return partial(FakeDecoder, log=Path(log), seconds=float(takes))


if __name__ == "__main__":
    log, takes, *arguments = sys.argv[1:]
    sys.exit(main(arguments, decoder=chosen(log, takes)))

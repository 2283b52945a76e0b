"""`python -m jobs.report OUT`: count the report of a run's folder again, from its rows and run.json alone.

Writes OUT/report.json and OUT/report.html and prints the summary: for a run that was stopped, or whose report was lost.
Needs no Ray and no model. Exit codes: 0 done; 2 OUT is no run's folder or cannot be read.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from jobs.runtime import set_up_logging
from pipeline.errors import ConfigError
from pipeline.page import summary_lines
from pipeline.redact import scrub_text
from pipeline.report import build_report, summarize
from pipeline.resume import RunFolder
from pipeline.run import count_output
from pipeline.sink import shards

logger = logging.getLogger("espstream")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", metavar="OUT", help="a run's output.path")
    options = parser.parse_args(arguments)
    set_up_logging()
    try:
        print("\n".join(rebuild(options.folder)))
    except (ConfigError, OSError) as error:
        print(f"error: {scrub_text(str(error))}", file=sys.stderr)
        return 2
    return 0


def rebuild(uri: str) -> list[str]:
    """Write the folder's reports anew; the lines of the summary. Raises ConfigError, OSError."""
    folder = RunFolder(uri)
    run = folder.read_run()
    if run is None:
        raise ConfigError(f"{folder.place.uri} has no run.json: it is no run's output folder")
    if not shards(folder.data):
        raise ConfigError(f"{folder.data.uri} holds no shards yet; there is nothing to count")
    totals, twice = count_output(folder.data)
    if len(twice):
        logger.warning("%d rows stand twice; the job's own command takes them out", len(twice))
    summary = summarize(totals, run=run)
    folder.write_report(*build_report(summary))
    return [*summary_lines(summary), f"{'report':<13}  {folder.place.child('report.html').uri}"]


if __name__ == "__main__":
    sys.exit(main())

"""`python -m jobs.generate --config FILE`: prompts in, generations out.

Results go to stdout, logs and progress to stderr. Exit codes: 0 done; 1 the job broke off (run it again to continue);
2 bad configuration, input or output place; 3 finished, with more error rows than errors.max_fraction allows; 130
interrupted (Ctrl-C, SIGTERM).
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console

from jobs.runtime import machine, ray_cluster, set_up_logging, versions
from pipeline.config import JobConfig, load_config
from pipeline.decoder import Decoder, EngineDecoder
from pipeline.errors import ConfigError
from pipeline.page import summary_lines
from pipeline.plan import Plan
from pipeline.redact import scrub_text
from pipeline.run import Job, RunError, Work, check_job, count_work, finish_job
from pipeline.source import read_rows

logger = logging.getLogger("espstream")

DONE, BROKEN, BAD_CONFIG, TOO_MANY_ERRORS, INTERRUPTED = 0, 1, 2, 3, 130
DRY_RUN_ROWS = 5


def main(arguments: Sequence[str] | None = None, decoder: Callable[[Plan], Decoder] = EngineDecoder) -> int:
    options = _parse(arguments)
    console = set_up_logging()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a prompt must not fail on an ASCII terminal
    try:
        return _run(options, console, decoder)
    except ConfigError as error:
        return _end(BAD_CONFIG, str(error))
    except RunError as error:
        return _end(BROKEN, str(error))
    except KeyboardInterrupt:
        return _end(INTERRUPTED, "interrupted; shards that were written stay, and the same command continues")


def _run(options: argparse.Namespace, console: Console, decoder: Callable[[Plan], Decoder]) -> int:
    config = load_config(options.config, _overrides(options))
    if options.print_config:
        print(scrub_text(config.dump_yaml()), end="")
        return DONE
    with interruptible() as listen, ray_cluster():
        listen()  # Ray has set its own
        job = check_job(config)
        if options.dry_run:
            print("\n".join(_plan_lines(job, count_work(job, exactly=True))))
            return DONE
        summary = finish_job(job, {"machine": machine(), "versions": versions()}, console, decoder)
    report = job.folder.place.child("report.html").uri
    print("\n".join([*summary_lines(summary), f"{'report':<13}  {report}"]))
    return _verdict(config, summary["rows"]["failed"], summary["rows"]["total"])


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """The first Ctrl-C or SIGTERM ends the body, later ones are ignored, so that what it started is put away.

    Yields what makes it so again where something in the body has set handlers of its own.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def interrupt(*_: object) -> NoReturn:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    def listen() -> None:
        for number in before:
            signal.signal(number, interrupt)

    listen()
    try:
        yield listen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(code: int, message: str) -> int:
    print(f"error: {scrub_text(message)}", file=sys.stderr)
    return code


def _verdict(config: JobConfig, failed: int, total: int) -> int:
    allowed = config.errors.max_fraction
    if total and failed / total > allowed:
        return _end(TOO_MANY_ERRORS, f"{failed} of {total} rows failed; errors.max_fraction allows {allowed:.2%}")
    return DONE


def _overrides(options: argparse.Namespace) -> list[str]:
    return [*options.set, *([f"input.limit={options.limit}"] if options.limit is not None else [])]


def _plan_lines(job: Job, work: Work) -> list[str]:
    """The dry run: what would run, and the first rows as the parser sees them."""
    plan, config = job.plan, job.plan.config
    decoder = config.decoder
    samples = f", {config.sampling.n} samples of each" if config.sampling.n > 1 else ""
    tree = f", {decoder.masks} masks, {decoder.tree} tree" if decoder.method == "esp" else ""
    rows = f", block complexity {decoder.block_complexity}" if decoder.method != "ar" else ""
    lines = [
        f"input     {job.scan.total} rows in {len(job.scan.files)} file(s), {len(job.scan.duplicates)} duplicate ids"
        + samples,
        f"model     {config.model.path} ({plan.model_identity}), {plan.dtype} on {plan.device}",
        f"decoder   {decoder.method}{tree}{rows}, {config.engine.slots} slots, max_length {plan.max_length}",
        f"cluster   {config.cluster.actors} actor(s) x {plan.num_cpus:g} CPUs, {plan.num_gpus:g} GPUs, "
        f"{plan.threads} threads",
        f"output    {job.folder.place.uri}: {work.finished} rows there, {work.owed} to do",
    ]
    read = (row for file in job.scan.files for row in read_rows(file, config.input, job.scan.duplicates))
    for row in itertools.islice(read, DRY_RUN_ROWS):
        shown = row.error or json.dumps(row.messages_or_prompt, ensure_ascii=False)[:100]
        lines.append(f"row       {row.row_id}: {shown}")
    return lines


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="python -m jobs.generate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML configuration")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="override one setting; repeatable"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N rows (input.limit)")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, decode nothing")
    parser.add_argument("--print-config", action="store_true", help="print the configuration with its defaults")
    return parser.parse_args(arguments)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(BAD_CONFIG, f"error: {message}\n")


if __name__ == "__main__":
    sys.exit(main())

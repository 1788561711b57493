"""The command line: `python -m cluster` and the console script `lagwise`.

Exit code 0: done. 1: failed, and the last line says why. 2: the request or the configuration was
wrong. Heavy libraries are imported only after the arguments are parsed and checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from correction.errors import ConfigError, LagwiseError

DONE, FAILED, WRONG = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, dispatch, and turn errors into one last line and an exit code."""
    options = _parser().parse_args(arguments)
    try:
        result: int = options.command(options)
        return result
    except ConfigError as error:
        print(f"lagwise: {error}", file=sys.stderr)
        return WRONG
    except LagwiseError as error:
        print(f"lagwise: failed: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("lagwise: interrupted", file=sys.stderr)
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lagwise",
        description="Asynchronous actor-learner reinforcement learning for language models.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="train as a configuration file says")
    run.set_defaults(command=_run)
    check = commands.add_parser("check", help="check a configuration and print its plan")
    check.set_defaults(command=_check)
    for command in (run, check):
        command.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file")
        command.add_argument(
            "--set",
            dest="overrides",
            action="append",
            default=[],
            metavar="key=value",
            help="override one key, for example --set lag.max_lag_versions=2",
        )

    bench = commands.add_parser("bench", help="run a benchmark and write its JSON")
    bench.set_defaults(command=_bench)
    bench.add_argument("name", metavar="NAME", help="a benchmark, `all` or `list`")
    bench.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="key=value",
        help="set one of the benchmark's own settings, where it has any",
    )
    bench.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for the JSON")
    return parser


def _run(options: argparse.Namespace) -> int:
    from cluster.config import load_config

    config = load_config(options.config, options.overrides)
    from cluster.ray_environment import set_ray_environment

    set_ray_environment()
    from cluster.run import run

    return run(config)


def _check(options: argparse.Namespace) -> int:
    from cluster.config import load_config

    config = load_config(options.config, options.overrides)
    from cluster.plan import describe_plan

    print(describe_plan(config))
    return DONE


def _bench(options: argparse.Namespace) -> int:
    from cluster.bench import run_benchmark

    return run_benchmark(options.name, options.out, options.settings)


if __name__ == "__main__":
    sys.exit(main())

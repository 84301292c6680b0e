"""`python -m hybrid_imagenet.benchmarks NAME [options]`: runs one benchmark of this package."""

import importlib
import pkgutil
import sys

from hybrid_imagenet import benchmarks
from hybrid_imagenet.comm.environment import restart_with_huge_pages
from hybrid_imagenet.errors import UserError


def main(argv: list[str]) -> int:
    """Runs the benchmark that the first argument names with the rest of the arguments."""
    names = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.name.startswith("_"))
    names = [name for name in names if name != "peers"]
    if not argv or argv[0] not in names:
        print(f"usage: hybrid-imagenet bench NAME [--name=value ...]; NAME is one of {', '.join(names)}")
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    try:
        return int(importlib.import_module(f"hybrid_imagenet.benchmarks.{argv[0]}").main(argv[1:]) or 0)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    restart_with_huge_pages()
    sys.exit(main(sys.argv[1:]))

"""Files of measurements: JSON, compressed by gzip where the name ends with .gz, as those in docs/performance."""

import gzip
import json
import pathlib


def read(path):
    data = pathlib.Path(path).read_bytes()
    return json.loads(gzip.decompress(data) if pathlib.Path(path).suffix == ".gz" else data)


def write(path, report):
    path = pathlib.Path(path)
    if path.suffix == ".gz":  # without a time, so that equal reports are equal files
        path.write_bytes(gzip.compress(json.dumps(report, separators=(",", ":")).encode(), mtime=0))
    else:
        path.write_text(json.dumps(report, indent=1) + "\n")


def page(path, suffix):
    """The path of the page or picture that is made of a report: h100.md of h100.json.gz."""
    path = pathlib.Path(path)
    return path.with_name(path.name.removesuffix(".gz").removesuffix(".json") + suffix)

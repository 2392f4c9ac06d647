"""Tables in documents, between `<!-- begin table: NAME -->` and `<!-- end table -->`."""

import re
import sys


def put(path, name, text, write):
    """Whether the table `name` of a document is this text; with `write`, makes it so."""
    before = path.read_text()
    block = re.compile(rf"(<!-- begin table: {name} -->\n).*?(<!-- end table -->\n)", re.DOTALL)
    if len(block.findall(before)) != 1:
        sys.exit(f"{path.name}: want the lines <!-- begin table: {name} --> and <!-- end table --> once each")
    after = block.sub(lambda lines: lines[1] + text + lines[2], before)
    if write:
        path.write_text(after)
    elif after != before:
        print(f"{path.name}: its table {name} is not that of the reports")
    return write or after == before

"""Made packages.txt, once, from the package index of Debian 12; it is needed no more.

python -m jobs.search.packages > jobs/search/packages.txt
"""

import random
import re
import subprocess

from jobs.search.bm25 import Index
from jobs.search.tasks import is_fair

NUMBER = 400
SECTIONS = {
    "admin", "comm", "editors", "games", "graphics", "hamradio", "mail", "math", "misc", "net",
    "science", "sound", "text", "utils", "vcs", "video", "web", "x11",
}  # fmt: skip


def main() -> None:
    """Print NUMBER lines of `name: description` whose tasks are all fair."""
    rest = candidates()
    random.Random(0).shuffle(rest)
    chosen: list[str] = []
    while len(chosen) < NUMBER:
        chosen += [rest.pop() for _ in range(NUMBER - len(chosen))]
        index = Index(chosen)
        chosen = [text for text in chosen if is_fair(text, index)]
    print("\n".join(sorted(chosen)))


def candidates() -> list[str]:
    """Packages with a short name, and a short description that does not give it away."""
    shell = ["apt-cache", "dumpavail"]
    records = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    found = set()
    for record in records.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Section|Description): (.*)$", record, re.M))
        name, description = fields.get("Package", ""), fields.get("Description", "")
        if (
            fields.get("Section") in SECTIONS
            and re.fullmatch(r"[a-z]{4,9}", name)
            and re.fullmatch(r"[A-Za-z ,-]+", description)
            and 4 <= len(description.split()) <= 7
            and name not in description.lower()
        ):
            found.add(f"{name}: {description}")
    return sorted(found)


if __name__ == "__main__":
    main()

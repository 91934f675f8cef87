"""The search tool: BM25 (Robertson and Zaragoza 2009) over the one-line texts of packages.txt."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

K1, B = 1.5, 0.75


def load() -> list[str]:
    """The corpus: lines of `name: description`."""
    return Path(__file__).with_name("packages.txt").read_text().splitlines()


class Index:
    """Texts that can be searched."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        self._counts = [Counter(words(text)) for text in texts]
        self._mean_length = sum(count.total() for count in self._counts) / len(texts)
        self._frequency = Counter(word for count in self._counts for word in count)

    def search(self, query: str, limit: int = 3) -> list[str]:
        """The texts that match best, the best first; none that does not match at all."""
        scores = self.scores(query)
        ranked = sorted(range(len(scores)), key=lambda i: -scores[i])
        return [self.texts[i] for i in ranked[:limit] if scores[i] > 0]

    def scores(self, query: str) -> list[float]:
        """How well each text matches."""
        wanted = {word: self._weight(word) for word in words(query)}
        return [
            sum(weight * self._share(count, word) for word, weight in wanted.items())
            for count in self._counts
        ]

    def _weight(self, word: str) -> float:
        n = self._frequency[word]
        return math.log(1 + (len(self.texts) - n + 0.5) / (n + 0.5))

    def _share(self, count: Counter[str], word: str) -> float:
        length = count.total() / self._mean_length
        return count[word] * (K1 + 1) / (count[word] + K1 * (1 - B + B * length))


def words(text: str) -> list[str]:
    """The words of a text, in small letters."""
    return re.findall("[a-z0-9]+", text.lower())

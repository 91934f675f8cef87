"""A preload that prints, and that looks at its surroundings when it is imported."""

import tempfile

print("imported", tempfile.gettempdir())

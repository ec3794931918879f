"""The helpers beside the tests (`build`, `vectors`) are importable in every import mode."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
